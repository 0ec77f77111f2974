"""`redrafter-mlx tune`: profile the target's forward cost and pick a beam shape."""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from redrafter_mlx.cli import options as opt
from redrafter_mlx.cli.flag import Flag
from redrafter_mlx.cli.progress import progress_bars
from redrafter_mlx.cli.terminal import Terminal
from redrafter_mlx.config import PLAIN, BeamShape, GenerationOptions
from redrafter_mlx.cpu.blas import BLAS
from redrafter_mlx.drafting.names import NONE
from redrafter_mlx.errors import BadInputError, BusyError, RedrafterError
from redrafter_mlx.runtime.busy_machine import BusyMachine
from redrafter_mlx.weights import Progress

if TYPE_CHECKING:
    from redrafter_mlx.engine.engine import Redrafter
    from redrafter_mlx.tuning.tuner import Tuner

_QUESTIONS = (0, 8, 13)
"""Indices of our own questions that sample acceptance: a letter, a function, an explanation."""

_TOKENS = 32
_LENGTH = 5  # length of the beams that sample acceptance; for longer ones it is extrapolated

_CONTEXT = 256  # tokens of text for which a shape is recommended

ExpectedRates = dict[BeamShape, tuple[float, float]]
"""Expected tokens/step and tokens per second of beam shapes."""

_NO_SHAPES = (
    "there is no drafter, or one along a static tree; tune needs one whose shape can be chosen, "
    "or --drafter lookup"
)


@opt.with_options
def command(
    *,
    as_json: opt.Json = False,
    plot: Annotated[
        str | None, Flag("Draw the curves; needs the extra `plot`.", "FILE.png")
    ] = None,
    again: Annotated[bool, Flag("Measure, though it was measured before.")] = False,
    raw: opt.Raw = False,
    loading: opt.ModelOptions,
) -> None:
    """Profile the target's forward cost (1 to 32 query rows) and drafting, and pick a beam shape.

    The shape of the drafts is chosen by this, step by step. Without it, times are assumed at first
    and corrected by what steps take. Takes up to a minute; leave the machine alone meanwhile.

    On a Linux CPU with several BLAS libraries it finds the fastest first, used from then on.

    Last come the expected gains of lookup, a published drafter and one trained here, with commands.
    """  # fmt: skip
    if plot is not None:
        from redrafter_mlx.bench.show.plot import check_plot

        check_plot(plot)
    if loading.drafter == NONE:
        raise BadInputError(_NO_SHAPES)
    from redrafter_mlx.cli.doctor.blas_choice import compare_libraries, restart_with

    chat_or = None if raw else opt.RAW_INSTEAD
    fastest = compare_libraries(loading, again, Terminal.standard().note, chat_or)
    if fastest is not None and fastest != BLAS.library:
        restart_with(fastest)
    loaded, machine = opt.load_model(loading, warm_up=False, chat_or=chat_or), BusyMachine.here()
    with progress_bars("measuring this machine", "{}%".format) as progress, machine.watched():
        tuning, expected = measure(loaded, again, progress, raw)
    for note in machine.notes():
        Terminal.standard().note(note)
    from redrafter_mlx.cli.tune.advice import describe_advice, ways_to_draft

    costs = tuning.costs
    ways = ways_to_draft(loaded, costs, _CONTEXT, loading.given, raw=raw)
    kept = str(tuning.file) if tuning.kept else None
    why = "cannot be written" if tuning.stores else "is not for drafters of your own code"
    if as_json:
        best = _best(expected)
        tokens, rate = expected[best]
        record = {
            **asdict(costs),
            "shape": {"beam_width": best.width, "beam_length": best.length, "nodes": best.nodes},
            "tokens_per_step": tokens,
            "speedup": rate / expected[PLAIN][1],
            "file": kept,
            "ways": [asdict(way) for way in ways],
            "notes": machine.notes(),
            "cliffs": [{"rows": r, "jump": j} for r, j in costs.cliffs().items()],
        }
        print(json.dumps(record))
    else:
        from redrafter_mlx.bench.show.curves import describe_curves

        on = costs.setup
        lines = [
            f"{on.chip} · {on.dtype} · mlx {on.mlx} · drafts by {loaded.drafting}",
            describe_curves(costs),
            "",
            describe_choice(expected),
            "",
            describe_advice(ways),
            f"kept in {kept}" if kept else f"not kept: {tuning.file} {why}",
        ]
        print("\n".join(lines), flush=True)
    if plot is not None:
        from redrafter_mlx.bench.show.curves import plot_curves

        plot_curves(costs, plot)


def measure(
    loaded: Redrafter, again: bool, progress: Progress, raw: bool
) -> tuple[Tuner, ExpectedRates]:
    """Measure this machine's costs if need be, and sample how often drafts are accepted.

    Raises BadInputError if there is no shape to choose.
    """
    tuning = loaded.tuning
    if tuning is None:
        raise BadInputError(_NO_SHAPES)
    if again or not tuning.measured:
        loaded.measure(lambda share: progress("calls", int(100 * share), 100))
    acceptance, prompts = tuning.statistics(), trial_prompts(loaded, raw)
    for i, prompt in enumerate(prompts if tuning.widest else [], 1):
        wide = GenerationOptions(max_tokens=_TOKENS, beam_width=tuning.widest, beam_length=_LENGTH)
        for answer in loaded.stream(prompt, options=wide):
            step = answer.step
            if (
                answer.steps > 0
                and answer.index == 0
                and not step.from_host
                and step.shape != PLAIN
            ):
                acceptance.learn(step)
        progress("drafts", 100 * i // len(prompts), 100)
    return tuning, tuning.expected_rates(acceptance, _CONTEXT)


def describe_choice(expected: ExpectedRates) -> str:
    """Describe in a sentence the best shape and its expected speed."""
    if {*expected} == {PLAIN}:
        return "drafts copies of the text, each as long as its match is expected to hold"
    drafted = _best({s: p for s, p in expected.items() if s != PLAIN})
    tokens, rate = expected[drafted]
    gain = rate / expected[PLAIN][1]
    shape = f"W {drafted.width}, L {drafted.length}, N {drafted.nodes}"
    if _best(expected) == PLAIN:
        return (
            f"falls back to plain decoding: at this drafter's acceptance the best beam shape, "
            f"{shape}, is expected to give {tokens:.2f} tokens/step and {gain:.2f} times its speed"
        )
    return (
        f"drafts {shape}: at this drafter's acceptance {tokens:.2f} tokens/step, "
        f"{gain:.2f} times the speed of plain decoding"
    )


def trial_prompts(loaded: Redrafter, raw: bool) -> list[list[int]]:
    from redrafter_mlx.bench.measure.questions import OWN_QUESTIONS

    return [loaded.encode(OWN_QUESTIONS[i].text, raw=raw) for i in _QUESTIONS]


def _best(expected: ExpectedRates) -> BeamShape:
    return max(expected, key=lambda shape: expected[shape][1])


def _main() -> None:
    """Sample the calls of one BLAS library for `compare_libraries`, in a process started for it.

    It reads the options from a line of standard input, which stays open as long as the result is
    wanted, and prints tokens per second. Nothing of it is kept.
    """
    from redrafter_mlx.cli.doctor.blas_choice import BUSY
    from redrafter_mlx.cli.tune.advice import TRAINED, expected_speed

    loading = opt.ModelOptions(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        # It has a chat template, or --raw was given.
        loaded = opt.load_model(loading, warm_up=False)
        tuning = loaded.tuning
        if tuning is None:
            raise BadInputError(_NO_SHAPES)
        costs = loaded.thread.run(tuning.sampled_costs)
        print(expected_speed(TRAINED, costs, costs.short_context).tokens_per_second, flush=True)
    except BusyError:
        sys.exit(BUSY)
    except RedrafterError:
        sys.exit(1)  # the process that compares gets the same error, and shows it


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    _main()
