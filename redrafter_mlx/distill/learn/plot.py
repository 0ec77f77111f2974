"""A plot of what was learned: tokens/step over the number of kept answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from redrafter_mlx.distill.report.plots import new_figure
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.learning.versions import LearningRun
from redrafter_mlx.runtime.files.atomic_write import atomic_write


def draw_history(runs: Sequence[LearningRun], model: str, path: Path) -> None:
    """Draw each run's tokens/step before and after, on the user's answers and general texts.

    A run that left the drafter as it was is drawn hollow.

    Raises BadInputError if there is no run, or no matplotlib.
    """
    if not runs:
        raise BadInputError(f"nothing was learned for {model} yet; run: redrafter-mlx learn")
    try:
        drawn = new_figure(8)
    except ImportError:
        raise BadInputError(
            "matplotlib is missing; install it with: pip install 'redrafter-mlx[plot]'"
        ) from None
    axes = drawn.subplots()
    for name, colour in (("own", "tab:blue"), ("general", "tab:grey")):
        label = {"own": "your answers, held out", "general": "general texts"}[name]
        for run in runs:
            pair = run.own if name == "own" else run.general
            if pair is None:
                continue
            filled = colour if run.version else "none"
            axes.plot([run.answers] * 2, pair, color=colour, alpha=0.4)
            axes.plot(run.answers, pair[1], "o", color=colour, markerfacecolor=filled, label=label)
            label = "_nolegend_"
    axes.set_xlabel("answers kept")
    axes.set_ylabel("tokens/step, mean of 1 to 4 beams")
    axes.set_title(f"what the drafter of {model} has learned", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    with atomic_write(path) as partial:
        drawn.savefig(partial, dpi=120)
