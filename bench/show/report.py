"""Results in a terminal: their tables and coloured heatmaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from redrafter_mlx.bench.analyse.compare import Change
from redrafter_mlx.bench.analyse.grid import Cell, Grid, grids
from redrafter_mlx.bench.analyse.result import Result
from redrafter_mlx.bench.analyse.serving import ServingRow
from redrafter_mlx.bench.show.tables import TextTable, spread, tables_of

_VIRIDIS = ((68, 59, 33, 94, 253), (1, 82, 145, 201, 231), (84, 139, 140, 98, 37))
"""matplotlib's colours from dark for slow to bright for fast: red, green and blue."""

_BEST = "★"


def rendered(result: Result) -> list[RenderableType]:
    """Draw the tables, with the heatmaps after the first."""
    main, *others = map(rich_table, tables_of(result))
    return [main, *map(heatmap, grids(result.rows, min_cells=2)), *others]


def compare_table(
    changes: Sequence[Change], before: str, after: str, differing: Sequence[str]
) -> TextTable:
    """Return a table of the figures that two results share; the note tells what else differs."""
    cells = tuple(
        (_describe(c.row), c.figure, spread(c.before), spread(c.after), spread(c.ratio, "x"),
         c.verdict)
        for c in changes
    )  # fmt: skip
    columns = ("row", "figure", before, after, "ratio", "verdict")
    note = "Brackets hold 95% intervals, over questions too: between runs of the same questions, "
    note += "differences that are smaller than those between questions do not show."
    if differing:
        note += f" What else differs: {'; '.join(differing)}."
    return TextTable(f"{after} over {before}", columns, cells, note)


def serving_table(rows: Sequence[ServingRow]) -> TextTable:
    several = len({row.url for row in rows}) > 1
    by_category = len({row.category for row in rows}) > 1
    lines = []
    for row in rows:
        compared = {"over the first": f"{row.speedup:.2f}x", "same text": f"{row.same_text:.0%}"}
        lines.append(
            {
                "server": row.url,
                "users": str(row.users),
                **({"questions": row.category} if by_category else {}),
                "answers": str(row.answers),
                "total tok/s": f"{row.total_tps:.2f}",
                "tok/s each": f"{row.user_tps:.2f}",
                "first token": f"{1000 * row.first_token:.0f} ms",
                "95%": f"{1000 * row.slowest_first_token:.0f} ms",
                **(compared if several else {}),
            }
        )
    return TextTable.of("Servers by users at once", lines)


def rich_table(table: TextTable) -> RenderableType:
    """Draw a table; figures are right-aligned, words left-aligned."""
    drawn = Table()
    for i, name in enumerate(table.columns):
        column = [row[i] for row in table.rows]
        figures = all(cell[:1].isdigit() or cell[:1] in ("", "-") for cell in column)
        drawn.add_column(Text(name), justify="right" if figures else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(cell) for cell in row))
    return _titled(table.title, drawn, table.note)


def heatmap(grid: Grid) -> RenderableType:
    """Draw tokens per second, and the speedup below, by beam width (rows) and length."""
    drawn = Table(show_lines=True)
    drawn.add_column("")
    for length in grid.lengths:
        drawn.add_column(f"L {length}", justify="center", no_wrap=True)
    for width in grid.widths:
        cells = [_heat_cell(grid, grid.at(width, length)) for length in grid.lengths]
        drawn.add_row(f"W {width}", *cells)
    note = f"{_BEST} the fastest shape; below the tokens a second, the speedup"
    return _titled(f"Tokens a second by beam shape ({grid.title})", drawn, note)


def _titled(title: str, drawn: Table, note: str) -> RenderableType:
    notes = [Text(note, style="dim")] if note else []
    return Group(Text(title, style="bold"), drawn, *notes, "")


def _heat_cell(grid: Grid, cell: Cell | None) -> Text:
    """Return `★ 31.42` above `1.25x`; an empty text if that shape was not measured."""
    if cell is None:
        return Text("")
    mark = f"{_BEST} " if cell == grid.best else ""
    places = np.linspace(0, 1, len(_VIRIDIS[0]))
    colour = [round(np.interp(grid.heat(cell), places, channel)) for channel in _VIRIDIS]
    letters = "black" if grid.is_light(cell) else "white"
    style = f"{'bold ' if mark else ''}{letters} on rgb({','.join(map(str, colour))})"
    return Text(f"{mark}{cell.tps:.2f}\n{cell.speedup:.2f}x", style=style)


def _describe(row: Mapping[str, object]) -> str:
    """Describe a row of a saved result in words."""
    named = [str(row[key]) for key in ("method", "drafter", "dtype") if row.get(key)]
    parts = named if row.get("batch_size") is None else [*named, f"batch of {row['batch_size']}"]
    W, L = row["beam_width"], row["beam_length"]
    if (W, L) != (None, None):
        parts.append(" x ".join("auto" if side is None else str(side) for side in (W, L)))
    if row["temperature"]:
        parts.append(f"{row['accept'] or ''} T {row['temperature']}".strip())
    for name in ("prefixes", "epsilon", "delta", "max_nodes", "draft_tokens", "prompt_tokens"):
        if row.get(name) not in (None, "all"):
            parts.append(f"{name.replace('_', ' ')} {row[name]}")
    return ", ".join([*parts, *([str(row["category"])] if row.get("category") else [])])
