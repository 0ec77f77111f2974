"""The result in a terminal: tables and coloured heatmaps."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from redrafter_mlx.bench.analyse.grid import Cell, Grid, grids
from redrafter_mlx.bench.analyse.result import Result
from redrafter_mlx.bench.show.tables import TextTable, header_lines, tables_of

_VIRIDIS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
"""matplotlib's colours, dark for slow and bright for fast."""

_LIGHT = 0.55
"""Heat from which dark letters are easier to read than light ones."""

_BEST = "★"


def show(result: Result, console: Console) -> None:
    """Print the result: header, tables, heatmaps, notes."""
    for line in header_lines(result):
        console.print(Text(line), soft_wrap=True)
    main, *others = tables_of(result)
    console.print(rich_table(main))
    for grid in grids(result.rows, least=2):
        console.print(heatmap(grid))
    for table in others:
        console.print(rich_table(table))
    for note in result.notes:
        console.print(Text(note), soft_wrap=True)


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
    """Draw a heatmap: rows are beam widths, columns beam lengths.

    A cell has tokens per second, and the speedup below it.
    """
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
    parts: list[RenderableType] = [Text(title, style="bold"), drawn]
    return Group(*parts, Text(note, style="dim"), "") if note else Group(*parts, "")


def _heat_cell(grid: Grid, cell: Cell | None) -> Text:
    """Return `★ 31.42` above `1.25x`; an empty text if that shape was not measured."""
    if cell is None:
        return Text("")
    mark = f"{_BEST} " if cell == grid.best else ""
    heat = grid.heat(cell)
    place = heat * (len(_VIRIDIS) - 1)
    i = min(int(place), len(_VIRIDIS) - 2)
    red, green, blue = (
        round(a + (b - a) * (place - i)) for a, b in zip(_VIRIDIS[i], _VIRIDIS[i + 1], strict=True)
    )
    letters = "black" if heat >= _LIGHT else "white"
    style = f"{'bold ' if mark else ''}{letters} on rgb({red},{green},{blue})"
    return Text(f"{mark}{cell.tps:.2f}\n{cell.speedup:.2f}x", style=style)
