"""Tests go through the door: none names a private member of the library."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import ROOT

PACKAGES = ("redrafter_mlx", "cli", "weights", "bench")
OF_OTHERS = {"_tokenizer", "_replace", "_exit", "_metadata"}
"""Names of mlx-lm, PyTorch and the standard library that ours have as well."""


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined_in(tree: ast.Module) -> Iterator[str]:
    """Yield the private names of functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def named_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and name of what a test imports, reads of another object, or names in a text.

    A text is one name, perhaps with its modules, as patches are given it, or a whole script.
    """
    formatted = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)
                 for part in node.values}  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("redrafter_mlx"):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) in formatted and "import " not in node.value:
                continue
            if re.fullmatch(r"[\w.]+\.\w+|_[a-z]\w+", node.value):
                yield node.lineno, node.value.rpartition(".")[2]
            elif "import " in node.value:
                for name in re.findall(r"\.(_[a-z]\w*)", node.value):
                    yield node.lineno, name


@pytest.fixture(scope="module")
def ours() -> set[str]:
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    names = {name for file in files for name in defined_in(ast.parse(file.read_text()))}
    return {name for name in names if private(name)} - OF_OTHERS


def violations(file: Path, ours: set[str]) -> list[str]:
    named = named_in(ast.parse(file.read_text()))
    return [f"{file.relative_to(ROOT)}:{line}: {name}" for line, name in named if name in ours]


def test_no_test_names_a_private_member(ours: set[str]) -> None:
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert len(files) > 100
    assert [found for file in files for found in violations(file, ours)] == []


@pytest.mark.parametrize(
    "line",
    [
        "engine._unheard", "from redrafter_mlx.engine import _unheard",
        "patch('redrafter_mlx.engine._unheard')", "patch(engine, '_unheard')",
        "run('import engine; engine._unheard')",
    ],
)  # fmt: skip
def test_each_way_to_name_one_is_found(line: str) -> None:
    names = {name for _, name in named_in(ast.parse(line))}
    assert "_unheard" in names
