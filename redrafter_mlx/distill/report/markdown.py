"""Markdown in which the words of others stay words: names of models, machines, command lines."""

from __future__ import annotations

import re
from collections.abc import Sequence


def plain(text: str) -> str:
    """Text on one line, without meaning to Markdown."""
    return re.sub(r"([\\`*_\[\]<>~#&])", r"\\\1", " ".join(text.split()))


def code(text: str) -> str:
    """Text as code, on one line."""
    line = " ".join(text.split())
    fence = "`" * (_longest_run(line) + 1)
    gap = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{gap}{line}{gap}{fence}"


def block(text: str, language: str) -> str:
    """Lines of code, fenced by more backticks than there are in them."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells that are Markdown already; a bar in one does not end it."""
    lines = [heads, ["---"] * len(heads), *rows]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
