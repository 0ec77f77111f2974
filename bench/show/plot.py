"""The heatmap as a picture, with line plots of tokens/step and speedup (the paper's Figure 7)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from redrafter_mlx.bench.analyse.grid import Cell, Grid
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.files.paths import check_writable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: str | Path) -> None:
    """Raise BadInputError, before hours of measuring, if the picture cannot be written."""
    path = Path(path)
    if path.suffix.lower() not in _SUFFIXES:
        raise BadInputError(f"--plot is {path}; its name must end in {', '.join(_SUFFIXES)}")
    if not path.parent.is_dir():
        raise BadInputError(f"--plot is {path}; there is no folder {path.parent}")
    if path.is_dir():
        raise BadInputError(f"--plot is {path}, which is a folder; give the name of a file")
    check_writable(path.parent, "--plot")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise BadInputError(
            "--plot needs matplotlib; install it with: pip install 'redrafter-mlx[plot]'"
        ) from None


def plot(grids: Sequence[Grid], path: str | Path, heading: str = "") -> None:
    """Draw tokens per second, tokens/step and speedup of each grid; errors of `check_plot`."""
    check_plot(path)
    if not grids:
        raise BadInputError("--plot has nothing to draw: no beam shape was measured")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.2 * len(grids) + 0.4), layout="constrained")
    axes = figure.subplots(len(grids), 3, squeeze=False)
    for grid, (heat, accepted, faster) in zip(grids, axes, strict=True):
        _heatmap(heat, grid)
        _lines(accepted, grid, "tokens/step", lambda c: c.tokens_per_step)
        _lines(faster, grid, "speedup", lambda c: c.speedup)
        faster.axhline(1.0, color="grey", linewidth=0.8, linestyle="--")
    if heading:
        figure.suptitle(heading, fontsize=10)
    save_figure(figure, path)


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write the picture; raises BadInputError if the file cannot be written."""
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise BadInputError(f"{path} cannot be written: {error.strerror or error}") from None


def _heatmap(axes: Axes, grid: Grid) -> None:
    """Draw tokens per second, bright for fast; frame the fastest shape, note each speedup."""
    from matplotlib.patches import Rectangle

    widths, lengths = grid.widths, grid.lengths
    values = np.full((len(widths), len(lengths)), np.nan)
    for cell in grid.cells:
        i, j = widths.index(cell.beam_width), lengths.index(cell.beam_length)
        values[i, j] = cell.tps
        best = cell == grid.best
        axes.text(
            j, i, f"{cell.tps:.1f}\n{cell.speedup:.2f}x", ha="center", va="center",
            color="black" if grid.is_light(cell) else "white",
            fontweight="bold" if best else "normal",
        )  # fmt: skip
        if best:
            frame = Rectangle((j - 0.48, i - 0.48), 0.96, 0.96, fill=False, lw=2.5, ec="red")
            axes.add_patch(frame)
    image = axes.imshow(values, cmap="viridis", aspect="auto")
    axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    axes.set_yticks(range(len(widths)), [str(width) for width in widths])
    axes.set(xlabel="beam length", ylabel="beam width")
    axes.set_title(f"tokens a second, {grid.title}", fontsize=10)
    axes.figure.colorbar(image, ax=axes)


def _lines(axes: Axes, grid: Grid, name: str, value: Callable[[Cell], float]) -> None:
    for length in grid.lengths:
        cells = sorted(cell for cell in grid.cells if cell.beam_length == length)
        widths = [cell.beam_width for cell in cells]
        axes.plot(widths, [*map(value, cells)], marker="o", label=f"length {length}")
    axes.set(xticks=grid.widths, xlabel="beam width", ylabel=name)
    axes.set_title(f"{name}, {grid.title}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
