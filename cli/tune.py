"""`redrafter-mlx tune`: profile the target's forward cost and pick a beam shape."""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from redrafter_mlx.cli import options as opt
from redrafter_mlx.cli.progress import progress_bars
from redrafter_mlx.cli.terminal import Terminal
from redrafter_mlx.config import PLAIN, BeamShape
from redrafter_mlx.errors import BadInputError, RedrafterError
from redrafter_mlx.runtime.blas import BLAS
from redrafter_mlx.weights import Progress

if TYPE_CHECKING:
    from redrafter_mlx.autotune.acceptance import AcceptanceStatistics
    from redrafter_mlx.autotune.batch_policy import BatchPolicy
    from redrafter_mlx.autotune.tuner import Tuner
    from redrafter_mlx.engine.engine import Redrafter

_QUESTIONS = (0, 8, 13)
"""Indices of our own questions that sample acceptance: a letter, a function, an explanation."""

_TOKENS = 32
_LENGTH = 5
"""Length of the beams that sample acceptance; for longer ones it is extrapolated."""

_CONTEXT = 256
"""Tokens of text for which a shape is recommended."""

_NO_SHAPES = (
    "there is no drafter, or one along a static tree; tune needs one whose shape can be chosen, "
    "or --drafter lookup"
)


@opt.with_options
def command(
    *,
    as_json: opt.Json = False,
    plot: Annotated[
        str | None,
        typer.Option(
            "--plot",
            metavar="FILE.png",
            show_default=False,
            help="Draw the curves; needs the extra `plot`.",
        ),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Measure, though it was measured before.")
    ] = False,
    loading: opt.ModelOptions,
) -> None:
    """Profile the target's forward cost (1 to 32 query rows) and drafting, and pick a beam shape.

    The shape of the drafts is chosen by this, step by step. Without it, times are assumed at first
    and measured bit by bit after answers. Takes some seconds; leave the machine alone meanwhile.

    On a Linux CPU with several BLAS libraries it finds the fastest first, used from then on.

    Last come the expected gains of lookup, a published drafter and one trained here, with commands.
    """  # fmt: skip
    if plot is not None:
        from redrafter_mlx.bench.show.plot import check_plot

        check_plot(plot)
    if loading.drafter == "none":
        raise BadInputError(_NO_SHAPES)
    from redrafter_mlx.cli.blas_choice import compare_libraries, restart_with

    fastest = compare_libraries(loading, again, Terminal.standard().note)
    if fastest is not None and fastest != BLAS.library:
        restart_with(fastest)
    loaded = opt.load_model(loading)
    with progress_bars("measuring this machine", lambda done, _: f"{done}%") as report:
        policy = measured_policy(loaded, again and fastest is None, report)
    from redrafter_mlx.cli.tune_advice import describe_advice, training_estimate, ways_to_draft

    tuning = _tuner_of(loaded)
    costs = tuning.costs
    ways = ways_to_draft(loaded, costs, _CONTEXT)
    if plot is not None:
        from redrafter_mlx.bench.show.curves import plot_curves

        plot_curves(costs, plot)
    kept = str(tuning.setup.path) if tuning.setup.path.exists() else None
    if as_json:
        record = {**asdict(costs), **_choice(policy), "file": kept}
        record["ways"] = [asdict(way) for way in ways]
        record["cliffs"] = [{"rows": r, "jump": j} for r, j in costs.cliffs().items()]
        sys.stdout.write(json.dumps(record) + "\n")
        return
    from redrafter_mlx.bench.show.curves import describe_curves

    on = costs.setup
    lines = [
        f"{on.chip} · {on.dtype} · mlx {on.mlx} · drafts by {loaded.drafting}",
        describe_curves(costs),
        "",
        describe_choice(policy),
        "",
        describe_advice(ways, training_estimate(loaded, costs)),
        f"kept in {kept}" if kept else f"not kept: {tuning.setup.path} cannot be written",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def measured_policy(loaded: Redrafter, again: bool, report: Progress | None) -> BatchPolicy:
    """Return the policy from this machine's costs, measured if need be, and a sample of acceptance.

    Raises BadInputError if there is no shape to choose.
    """
    from redrafter_mlx.autotune.batch_policy import BatchPolicy

    tuning = _tuner_of(loaded)
    if again or not tuning.measured:
        tuning.measure(lambda share: report("calls", int(100 * share), 100) if report else None)
    acceptance, prompts = tuning.statistics(), _prompts(loaded)
    for i, prompt in enumerate(prompts if tuning.widest else []):
        _sample_acceptance(loaded, tuning.widest, prompt, acceptance)
        if report is not None:
            report("drafts", 100 * (i + 1) // len(prompts), 100)
    return BatchPolicy(tuning.costs, acceptance)


def best_rate(policy: BatchPolicy) -> float:
    """Return the tokens per second that the best shape promises."""
    promises = policy.promises(_CONTEXT)
    return promises[_best(promises)][1]


def _tuner_of(loaded: Redrafter) -> Tuner:
    if loaded.tuning is None:
        raise BadInputError(_NO_SHAPES)
    return loaded.tuning


def describe_choice(policy: BatchPolicy) -> str:
    """Describe in a sentence the best shape and what it promises."""
    promises = policy.promises(_CONTEXT)
    if {*promises} == {PLAIN}:
        return "drafts copies of the text, each as long as its match is expected to hold"
    drafted = _best({s: p for s, p in promises.items() if s != PLAIN})
    tokens, rate = promises[drafted]
    gain = rate / promises[PLAIN][1]
    if _best(promises) == PLAIN:
        return (
            f"falls back to plain decoding: at this drafter's acceptance the best beam shape, "
            f"{in_words(drafted)}, promises {tokens:.2f} tokens/step and {gain:.2f} times its speed"
        )
    return (
        f"drafts {in_words(drafted)}: at this drafter's acceptance {tokens:.2f} tokens/step, "
        f"{gain:.2f} times the speed of plain decoding"
    )


def in_words(shape: BeamShape) -> str:
    """Return a shape as `W 2, L 4, N 7`."""
    return f"W {shape.width}, L {shape.length}, N {shape.nodes}"


def shape_note(usual: BeamShape | None, nodes: float | None, tokens_per_step: float) -> str | None:
    """Describe shapes that were chosen step by step, for the statistics line.

    `nodes` is the number verified per step, not the number that the shape has room for.
    """
    if usual is None or nodes is None:
        return None
    if usual == PLAIN and tokens_per_step > 1:  # copies of the text make few, but long steps
        return "most steps plain"
    if usual == PLAIN:
        return "decoding plainly: drafting does not pay here"
    return f"mostly W {usual.width}, L {usual.length}, N {nodes:.3g}"


def _prompts(loaded: Redrafter) -> list[list[int]]:
    from redrafter_mlx.bench.measure.questions import OWN_QUESTIONS

    return [loaded.encode(OWN_QUESTIONS[i].text) for i in _QUESTIONS]


def _sample_acceptance(
    loaded: Redrafter, widest: int, prompt: list[int], acceptance: AcceptanceStatistics
) -> None:
    """Update `acceptance` from an answer whose drafts are verified as large trees."""
    for response in loaded.stream(
        prompt, max_tokens=_TOKENS, beam_width=widest, beam_length=_LENGTH
    ):
        step = response.step
        if response.steps > 0 and response.index == 0 and not step.copied and step.shape != PLAIN:
            acceptance.learn(step)


def _choice(policy: BatchPolicy) -> dict[str, object]:
    """Return the best shape for programs, with its tokens/step and speedup over plain decoding."""
    promises = policy.promises(_CONTEXT)
    best = _best(promises)
    tokens, rate = promises[best]
    return {
        "shape": {"beam_width": best.width, "beam_length": best.length, "nodes": best.nodes},
        "tokens_per_step": tokens,
        "speedup": rate / promises[PLAIN][1],
    }


def _best(promises: dict[BeamShape, tuple[float, float]]) -> BeamShape:
    """Return the shape with the most tokens per second."""
    return max(promises, key=lambda shape: promises[shape][1])


def _main() -> None:
    """Measure one BLAS library for `compare_libraries`, in a process started for it.

    It reads the options from a line of standard input, which stays open as long as the result is
    wanted, and prints tokens per second on standard output.
    """
    loading = opt.ModelOptions(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        policy = measured_policy(opt.load_model(loading), again=True, report=None)
        print(best_rate(policy), flush=True)
    except RedrafterError:
        sys.exit(1)  # the process that compares gets the same error, and shows it


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    _main()
