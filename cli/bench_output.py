"""What `bench` prints and draws."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console

from redrafter_mlx.bench.analyse.compare import compare, read_result
from redrafter_mlx.bench.analyse.grid import grids
from redrafter_mlx.bench.analyse.result import Result, changes_to_json
from redrafter_mlx.bench.show.plot import plot as draw
from redrafter_mlx.bench.show.report import markdown, markdown_table, rich_table, show
from redrafter_mlx.bench.show.tables import compare_table
from redrafter_mlx.errors import BadInputError


def print_result(result: Result, output: str, plot: str | None, stdout: TextIO) -> None:
    """The result in the form asked for, and the picture."""

    if output == "table":
        # In a pipe nothing is folded: a table is for the one who reads the file.
        show(result, Console(file=stdout, width=None if stdout.isatty() else 200))
    else:
        forms = {"md": lambda: markdown(result), "csv": result.to_csv, "json": result.to_json,
                 "jsonl": result.to_jsonl}  # fmt: skip
        stdout.write(forms[output]() + "\n")
        stdout.flush()
    if plot is not None:
        m = result.machine
        draw(grids(result.rows), plot, f"{m.chip} ({m.device}), mlx {m.mlx}")


def print_comparison(before: str, after: str, output: str) -> None:
    """Two saved results side by side."""

    if output not in ("table", "md", "json"):
        raise BadInputError(f"--compare has no form {output!r}; choose table, md or json")
    changes = compare(read_result(before), read_result(after))
    table = compare_table(changes, before, after)
    if output == "table":
        Console(width=None if sys.stdout.isatty() else 200).print(rich_table(table))
    else:
        print(changes_to_json(changes) if output == "json" else markdown_table(table))
