"""`redrafter-mlx tune`: what steps cost on this machine, and the shape that follows from it."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from redrafter_mlx.cli import options as opt
from redrafter_mlx.cli.progress import progress_bars
from redrafter_mlx.config import PLAIN, BeamShape
from redrafter_mlx.errors import BadInputError

if TYPE_CHECKING:
    from redrafter_mlx.autotune.policy import ShapePolicy
    from redrafter_mlx.engine.engine import Redrafter

_QUESTIONS = (0, 8, 13)
"""Of our own: a letter, a function and an explanation, to hear how drafts fare."""

_TOKENS = 32
_NOT_KEPT = "not kept: this machine was too busy to be measured; run tune again when it is idle"
_CONTEXT = 256
"""Tokens of text at which a shape is named."""


@opt.with_options
def command(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
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
    """Measure what drafting costs here: calls of 1 to 32 rows, drafts of every shape.

    The shape of the drafts is chosen by this, step by step. Without it, the times are assumed at
    first and measured bit by bit after answers. Takes some seconds on a machine that is left alone
    meanwhile.
    """  # fmt: skip
    if plot is not None:
        from redrafter_mlx.bench.show.plot import check_plot

        check_plot(plot)
    loaded = opt.load_model(loading)
    tuning = loaded.tuning
    if tuning is None:
        raise BadInputError("nothing drafts; tune needs a drafter, or --drafter lookup")
    with progress_bars("measuring this machine", lambda done, _: f"{done}%") as report:
        if again or not tuning.measured:
            tuning.measure(lambda share: report("calls", int(100 * share), 100) if report else None)
        curves = tuning.curves()
        policy = tuning.listen(
            _prompts(loaded), _TOKENS,
            lambda share: report("drafts", int(100 * share), 100) if report else None,
        )  # fmt: skip
    if plot is not None:
        from redrafter_mlx.bench.show.curves import plot_curves

        plot_curves(curves, plot)
    kept = str(tuning.setup.path) if tuning.setup.path.exists() else None
    if as_json:
        record = {**curves.to_dict(), **_choice(policy), "file": kept}
        record["cliffs"] = [{"rows": c.rows, "jump": c.jump} for c in curves.cliffs()]
        sys.stdout.write(json.dumps(record) + "\n")
        return
    from redrafter_mlx.bench.show.curves import describe_curves

    on = curves.setup
    lines = [
        f"{on.chip} · {on.dtype} · mlx {on.mlx} · drafts by {loaded.drafting}",
        describe_curves(curves),
        "",
        describe_choice(policy),
        f"kept in {kept}" if kept else _NOT_KEPT,
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def describe_choice(policy: ShapePolicy) -> str:
    """The shape that promises most, and how much, in a sentence."""
    rates = policy.rates(_CONTEXT)
    if {*rates} == {PLAIN}:
        return "drafts copies of the text alone, each as long as its match promises to hold"
    best, drafted = _best(rates), _best({s: r for s, r in rates.items() if s != PLAIN})
    gain = rates[drafted] / rates[PLAIN]
    tokens = policy.odds.tokens()[drafted]
    if best == PLAIN:
        return (
            f"decodes plainly: at this drafter's acceptance the best drafts, {in_words(drafted)}, "
            f"promise {tokens:.2f} tokens/step and {gain:.2f} times the speed"
        )
    return (
        f"drafts {in_words(best)}: at this drafter's acceptance {tokens:.2f} tokens/step, "
        f"{gain:.2f} times the speed of plain decoding"
    )


def in_words(shape: BeamShape) -> str:
    """`W 2, L 4, N 7`."""
    return f"W {shape.width}, L {shape.length}, N {shape.nodes}"


def shape_note(usual: BeamShape | None, nodes: float | None) -> str | None:
    """What the statistics line says of shapes that were chosen step by step.

    `nodes` is how many were verified in a step, not how many there was room for.
    """
    if usual is None or nodes is None:
        return None
    if usual == PLAIN:
        return "decoding plainly: drafting does not pay here"
    return f"mostly W {usual.width}, L {usual.length}, N {nodes:.3g}"


def _prompts(loaded: Redrafter) -> list[list[int]]:
    from redrafter_mlx.bench.measure.questions import OWN_QUESTIONS

    return [loaded.encode(OWN_QUESTIONS[i].text) for i in _QUESTIONS]


def _choice(policy: ShapePolicy) -> dict[str, object]:
    """The same for programs: the shape, its tokens a step and its speed beside plain decoding."""
    rates, tokens = policy.rates(_CONTEXT), policy.odds.tokens()
    best = _best(rates)
    return {
        "shape": {"beam_width": best.width, "beam_length": best.length, "nodes": best.nodes},
        "tokens_per_step": tokens.get(best, 1.0),
        "speedup": rates[best] / rates[PLAIN],
    }


def _best(rates: dict[BeamShape, float]) -> BeamShape:
    return max(rates, key=lambda shape: rates[shape])
