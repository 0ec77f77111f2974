"""Figures over beam width and length, from which both heatmaps, terminal and picture, are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from redrafter_mlx.bench.analyse.summary import WHOLE, Row


class Cell(NamedTuple):
    """One beam shape."""

    beam_width: int
    beam_length: int
    tps: float
    speedup: float
    tokens_per_step: float


@dataclass(frozen=True)
class Grid:
    """Cells that differ in beam shape alone; not every width needs every length."""

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

    def heat(self, cell: Cell) -> float:
        """0 for the slowest shape, 1 for the fastest."""
        least = min(c.tps for c in self.cells)
        span = self.best.tps - least
        return (cell.tps - least) / span if span > 0 else 1.0


def grids(rows: Sequence[Row], least: int = 1) -> list[Grid]:
    """A grid for each dtype, drafter and acceptance method that has at least `least` shapes."""
    cells: dict[tuple[str, str, str, float], list[Cell]] = {}
    for r in rows:
        m = r.method
        if r.category != WHOLE or m.beam_width is None or m.beam_length is None:
            continue
        if r.tps is None or r.speedup is None or r.tokens_per_step is None:
            continue
        figures = (r.tps.median, r.speedup.median, r.tokens_per_step.median)
        key = (r.dtype, m.drafter or "", m.accept or "", m.temperature)
        cells.setdefault(key, []).append(Cell(m.beam_width, m.beam_length, *figures))
    found = []
    for (dtype, drafter, accept, temperature), group in cells.items():
        by = f", {drafter}" if drafter else ""
        drawn = "greedy" if temperature == 0 else f"{accept} at temperature {temperature:g}"
        if len(group) >= least:
            found.append(Grid(f"{dtype}{by}, {drawn}", tuple(group)))
    return found
