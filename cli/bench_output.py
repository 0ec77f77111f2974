"""What `bench` prints and draws."""

from __future__ import annotations

import json
import sys
from typing import TextIO

from rich.console import Console

from redrafter_mlx.bench.analyse.compare import compare, read_rows
from redrafter_mlx.bench.analyse.grid import grids
from redrafter_mlx.bench.analyse.result import Result
from redrafter_mlx.bench.show.plot import plot as draw
from redrafter_mlx.bench.show.report import rich_table, show
from redrafter_mlx.bench.show.tables import compare_table


def print_result(result: Result, output: str, plot: str | None, stdout: TextIO) -> None:
    """The result in the form asked for, and the picture."""

    if output == "json":
        print(json.dumps(result.to_dict()), file=stdout, flush=True)
    else:
        show(result, Console(file=stdout, width=_width(stdout)))
    if plot is not None:
        m = result.machine
        draw(grids(result.rows), plot, f"{m.chip} ({m.device}), mlx {m.mlx}")


def print_comparison(before: str, after: str, output: str) -> None:
    """Two saved results side by side."""
    changes = compare(read_rows(before), read_rows(after))
    if output == "json":
        print(json.dumps({"changes": [change.to_dict() for change in changes]}))
    else:
        table = rich_table(compare_table(changes, before, after))
        Console(width=_width(sys.stdout)).print(table)


def _width(stdout: TextIO) -> int | None:
    """In a pipe no cell is folded: the table is for whoever reads the file."""
    return None if stdout.isatty() else 200
