"""Published figures, from the papers' data files, with paper, version and table number.

A data file has an object for each table: `published`, its figures, see `Published`; `measured`, how
`bench --paper` measures it, see `PaperProtocol`; `timings`, the authors' own, see `Timings`. Only
figures are kept, no text of a paper. Figures that are not at hand are named as missing.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from redrafter_mlx.bench.analyse.grid import Cell, Grid

CHIPS = {"m1-max": "M1 Max", "m2-ultra": "M2 Ultra"}
"""The Macs that the authors timed."""


Record = Mapping[str, str | float | None]
"""A published row by column."""


@dataclass(frozen=True)
class Setting:
    """The conditions under which the figures were measured."""

    model: str
    machine: str
    questions: str
    baseline: str


@dataclass(frozen=True)
class Published:
    """One table or figure of a paper."""

    paper: str  # number and version of the paper
    number: str  # number of the table in the paper
    title: str
    setting: Setting
    columns: tuple[str, ...]  # of the figures
    rows: tuple[tuple[str | float | None, ...], ...]  # empty if they are not at hand
    missing: str = ""  # what is not at hand; "" if nothing is missing
    source: str = ""  # where the figures were read, if not in the paper itself
    across: str = ""  # column whose values head columns; figures are after it

    def records(self) -> list[Record]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


class Timings(NamedTuple):
    """Timings of one chip and dtype, in seconds, for `tokens` new tokens.

    drafted: by beam width and length: number of target calls, and seconds without the prompt's
    """

    tokens: int
    plain: float
    drafted: dict[tuple[int, int], tuple[int, float]]


def published(name: str) -> Published:
    """Return the figures of a table by its name; raises KeyError."""
    found = paper_data()[name]["published"]
    return Published(
        **{
            **found,
            "setting": Setting(**found["setting"]),
            "columns": tuple(found["columns"]),
            "rows": tuple(map(tuple, found["rows"])),
        }
    )


def comparable(name: str) -> list[Record]:
    """Return a table's rows by column, and the authors' own timings of it in bfloat16, if any."""
    records = published(name).records()
    if not (grids := authors_grids(name, "bfloat16")):
        return records
    records = [{"dtype": "float16", **record} for record in records]
    for machine, grid in zip(CHIPS.values(), grids, strict=True):
        where = {"dtype": "bfloat16", "machine": machine, "target": "Vicuna 7B"}
        for W, L, *cell in grid.cells:
            tps, speedup, tokens = (round(figure, 2) for figure in cell)
            figures = {"tok/s": tps, "speedup": speedup, "tokens/step": tokens}
            records.append({**where, "W": W, "L": L, **figures})
    return records


def shown(value: str | float | None) -> str:
    """Format a published figure, with the decimals that the paper prints and at least two."""
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.2f}" if value == round(value, 2) else f"{value:g}"


def timings(chip: str, dtype: str) -> Timings:
    """Return the authors' own timings of one of CHIPS in float16 or bfloat16."""
    data = paper_data()["table2"]["timings"]
    found = data["machines"][chip][dtype]
    prompt = mean(found["prompt_ms"])
    drafted = {(W, L): (calls, (ms - prompt) / 1e3) for W, L, calls, ms in found["drafted"]}
    return Timings(data["tokens"], mean(found["plain_ms"]) / 1e3, drafted)


def authors_grids(name: str, dtype: str) -> list[Grid]:
    """Return the authors' cells of all CHIPS; empty for a table without timings of theirs."""
    return [authors_grid(chip, dtype) for chip in CHIPS] if "timings" in paper_data()[name] else []


def authors_grid(chip: str, dtype: str) -> Grid:
    """Return the authors' 16 greedy cells of one chip and dtype, as in their own analysis."""
    tokens, plain, drafted = timings(chip, dtype)
    cells = tuple(
        Cell(W, L, tokens / took, plain / took, tokens / calls)
        for (W, L), (calls, took) in drafted.items()
    )
    return Grid(f"{CHIPS[chip]}, Vicuna 7B, {dtype}, the authors' timings", cells)


@functools.cache
def paper_data() -> Mapping[str, Any]:
    """Return the objects of all data files by the names of their tables."""
    files = sorted((Path(__file__).parent / "data").glob("*.json"))
    tables: dict[str, Any] = {}
    for file in files:
        tables |= json.loads(file.read_text(encoding="utf-8"))
    return tables
