"""Plots of a training run, from its log: `loss.png` and `accuracy.png`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from redrafter_mlx.distill.report.metrics import read_metrics
from redrafter_mlx.runtime.files.atomic_write import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


from redrafter_mlx.errors import BadInputError
from redrafter_mlx.learning.versions import LearningRun

Record = dict[str, Any]
"""One event of the log."""

LOSS = "loss.png"
ACCURACY = "accuracy.png"

_NOTE = "no pictures of the training: install matplotlib with: pip install 'redrafter-mlx[plot]'"

_WINDOWS = 50
"""The loss is averaged over windows of a fiftieth of the run, since single steps are noisy."""


def draw_plots(folder: Path) -> str | None:
    """Plot the events in a folder's log; without matplotlib return a line on it, and go on."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return _NOTE
    log = read_metrics(folder)
    try:
        figures = ("step", loss_figure, LOSS), ("evaluation", accuracy_figure, ACCURACY)
        for kind, draw, name in figures:
            if events := [record for record in log if record["event"] == kind]:
                with atomic_write(folder / name) as partial:
                    draw(events).savefig(partial, dpi=120)
    except OSError as error:
        return f"no pictures of the training: {folder}: {error.strerror or error}"
    return None


def running_mean(values: Sequence[float] | np.ndarray, window: int) -> np.ndarray:
    """Return the mean of up to `window` values before and at each; NaN is left out."""
    known, ones = np.isfinite(values), np.ones(window)
    sums = np.convolve(np.where(known, values, 0.0), ones)[: len(values)]
    numbers = np.convolve(known, ones)[: len(values)]
    mean: np.ndarray = np.where(numbers > 0, sums, np.nan) / np.maximum(numbers, 1)
    return mean


def loss_figure(steps: Sequence[Record]) -> Figure:
    figure = new_figure(8)
    axes = figure.subplots()
    at = [s["step"] for s in steps]
    loss = np.array([s["loss"] for s in steps], np.float64)  # null becomes NaN
    axes.plot(at, loss, color="tab:blue", alpha=0.25, linewidth=0.8, label="each step")
    window = max(1, len(loss) // _WINDOWS)
    axes.plot(at, running_mean(loss, window), color="tab:blue", label=f"mean of {window}")
    _label(axes, "loss", "training loss")
    rate = axes.twinx()
    rate.plot(at, [s["learning_rate"] for s in steps], color="grey", linewidth=0.8, linestyle="--")
    rate.set_ylabel("learning rate (dashed)", color="grey")
    rate.set_ylim(bottom=0)
    rate.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    return figure


def accuracy_figure(evaluations: Sequence[Record]) -> Figure:
    """Plot held-out top-1 by position (left) and simulated tokens/step by beam width (right)."""
    figure = new_figure(13)
    accuracy, accepted = figure.subplots(1, 2)
    at = [e["step"] for e in evaluations]
    for position in range(len(evaluations[0]["top1"])):
        values = [e["top1"][position] for e in evaluations]
        accuracy.plot(at, values, marker="o", markersize=3, label=f"position {position + 1}")
    accuracy.set_ylim(bottom=0)
    _label(accuracy, "top-1", "share of first guesses that are the target's token, held-out texts")
    for width in evaluations[0]["tokens_per_step"]:
        values = [e["tokens_per_step"][width] for e in evaluations]
        accepted.plot(at, values, marker="o", markersize=3, label=f"beam width {width}")
    best = [e["step"] for e in evaluations if e["best"]]
    if best:
        accepted.axvline(best[-1], color="grey", linewidth=0.8, linestyle="--", label="saved")
    _label(accepted, "tokens/step", "simulated tokens/step, held-out texts")
    return figure


def new_figure(width: float) -> Figure:
    """Return a figure without a window; raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _label(axes: Axes, name: str, title: str) -> None:
    axes.set_xlabel("step")
    axes.set_ylabel(name)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def draw_history(runs: Sequence[LearningRun], model: str, path: Path) -> None:
    """Draw each run's tokens/step before and after, on the user's answers and general texts.

    A run that left the drafter as it was is hollow. Raises BadInputError without runs or
    matplotlib.
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
