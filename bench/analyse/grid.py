"""Figures by beam width and length: the data of both heatmaps, in the terminal and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from redrafter_mlx.bench.analyse.summary import Row
from redrafter_mlx.bench.measure.methods import Method
from redrafter_mlx.bench.measure.questions import WHOLE


class Cell(NamedTuple):
    """Figures of one beam shape."""

    beam_width: int
    beam_length: int
    tps: float
    speedup: float
    tokens_per_step: float


@dataclass(frozen=True)
class Grid:
    """Cells that differ only in beam shape; not every width needs every length."""

    title: str
    cells: tuple[Cell, ...]

    @property
    def widths(self) -> list[int]:
        return sorted({c.beam_width for c in self.cells})

    @property
    def lengths(self) -> list[int]:
        return sorted({c.beam_length for c in self.cells})

    @property
    def best(self) -> Cell:
        """The fastest shape."""
        return max(self.cells, key=lambda c: c.tps)

    def at(self, width: int, length: int) -> Cell | None:
        return next((c for c in self.cells if c[:2] == (width, length)), None)

    def is_light(self, cell: Cell) -> bool:
        """Whether dark letters are easier to read on the cell's colour than light ones."""
        return self.heat(cell) >= 0.55

    def heat(self, cell: Cell) -> float:
        """Return the colour value: 0 for the slowest shape, 1 for the fastest."""
        lowest = min(c.tps for c in self.cells)
        span = self.best.tps - lowest
        return (cell.tps - lowest) / span if span > 0 else 1.0


def grids(rows: Sequence[Row], min_cells: int = 1) -> list[Grid]:
    """Return a grid per drafter and acceptance method with at least `min_cells` beam shapes."""
    cells: dict[tuple[str, Method], list[Cell]] = {}
    for r in rows:
        m = r.method
        if r.category != WHOLE or m.batch_size is not None:
            continue
        if m.beam_width is None or m.beam_length is None:
            continue
        if r.tps and r.speedup and r.tokens_per_step:
            figures = (r.tps.median, r.speedup.median, r.tokens_per_step.median)
            way = replace(m, beam_width=None, beam_length=None)
            cells.setdefault((r.dtype, way), []).append(Cell(m.beam_width, m.beam_length, *figures))
    found = []
    for (dtype, way), group in cells.items():
        parts = [dtype, way.drafter, way.prefixes if way.prefixes != "all" else None]
        if way.temperature == 0:
            parts.append("greedy")
        else:
            parts.append(f"{way.accept} at temperature {way.temperature:g}")
        limits = {"epsilon": way.epsilon, "delta": way.delta, "max nodes": way.max_nodes}
        parts += [f"{name} {value:g}" for name, value in limits.items() if value is not None]
        if len(group) >= min_cells:
            found.append(Grid(", ".join(filter(None, parts)), tuple(group)))
    return found
