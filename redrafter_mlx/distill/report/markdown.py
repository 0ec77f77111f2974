"""Markdown that shows given text literally: names of models, machines, command lines."""

from __future__ import annotations

import re
from collections.abc import Sequence


def plain(text: str) -> str:
    """Return text on one line, with Markdown's special characters escaped."""
    return re.sub(r"([\\`*_\[\]<>~#&])", r"\\\1", " ".join(text.split()))


def code(text: str) -> str:
    """Return text as inline code, on one line."""
    line = " ".join(text.split())
    fence = "`" * (_longest_run(line) + 1)
    gap = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{gap}{line}{gap}{fence}"


def block(text: str, language: str) -> str:
    """Return a code block, with a fence longer than any run of backticks in the code."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of cells that are already Markdown; bars in cells are escaped."""
    lines = [heads, ["---"] * len(heads), *rows]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
