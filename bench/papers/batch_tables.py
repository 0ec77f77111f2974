"""Columns of the papers' tables that are measured with several concurrent requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from redrafter_mlx.bench.analyse.summary import Row
from redrafter_mlx.bench.papers.columns import Layout, paper_table, setting, settings_of
from redrafter_mlx.bench.papers.evidence import Evidence
from redrafter_mlx.bench.papers.published import Record
from redrafter_mlx.bench.show.tables import OUT_OF_MEMORY, TextTable, beam_side, number, spread

COLUMNS: Mapping[str, Callable[[Row], str]] = {
    "requests": lambda row: str(row.method.batch_size),
    "W": lambda row: _width(row, "no drafts"),
    "k": lambda row: _width(row, "0"),
    "tok/s each": lambda row: spread(row.tps),
    "total tok/s": lambda row: spread(row.total_tps),
    "over no drafts": lambda row: spread(row.over_plain, "x"),
    "ms a token": lambda row: number(_milliseconds(row), ".1f"),
    "tokens/step": lambda row: spread(row.tokens_per_step),
}
_SETTINGS = ("requests", "W", "k")
_TIMES = ("tok/s each", "total tok/s", "ms a token")


def batch_table(layout: Layout, evidence: Evidence, known: Sequence[Record]) -> TextTable:
    """Return the table of the batches that were measured."""

    def cell(length: int | None, row: Row, heading: str) -> str:
        if heading == "prompt tokens":
            return setting(length)
        if row.out_of_memory and heading not in _SETTINGS:
            return OUT_OF_MEMORY if heading in _TIMES else ""
        return COLUMNS[heading](row)

    lines = [
        ({"prompt tokens": length, **settings_of(row.method)}, partial(cell, length, row))
        for length, row in evidence.batches
    ]
    large = any(row.out_of_memory for _, row in evidence.batches)
    return paper_table(
        layout, lines, known, f"{OUT_OF_MEMORY}: does not fit in memory" if large else ""
    )


def _milliseconds(row: Row) -> float | None:
    return 1000 / row.tps.median if row.tps and row.tps.median else None


def _width(row: Row, plain: str) -> str:
    if row.method.name != "redrafter":
        return "mlx-lm" if row.method.name == "mlx-lm" else plain
    return beam_side(row.method, row.method.beam_width)
