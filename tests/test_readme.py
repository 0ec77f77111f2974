"""What the README says is shown, and by which command, is so."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from tiny import ARCHITECTURES, MLX_LM

TESTS = Path(__file__).parent
README = (TESTS.parent / "README.md").read_text(encoding="utf-8")
BY_DEFAULT, EXHAUSTIVE = (
    "How that is shown, by `python -m pytest -q`:",
    "-m exhaustive`, some hours",
)


def table_after(words: str) -> list[str]:
    """The rows of the first table after `words`."""
    _, _, rest = README.partition(words)
    rows = re.search(r"(?:^\|.*\n)+", rest, re.MULTILINE)
    assert rows is not None
    return rows.group().splitlines()[2:]


def known_tests() -> dict[str, bool]:
    """Every test by its name, and whether a plain pytest runs it; files stand for any of theirs."""
    found: dict[str, bool] = {}
    for path in TESTS.glob("test_*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                marks = [ast.unparse(mark) for mark in node.decorator_list]
                runs = "pytest.mark.exhaustive" not in marks
                found[node.name] = found.get(node.name, False) or runs
                named = f"tests/{path.name}"
                found[named] = found.get(named, False) or runs
    return found


@pytest.mark.parametrize(("words", "by_default"), [(BY_DEFAULT, True), (EXHAUSTIVE, False)])
def test_each_law_names_tests_that_its_command_runs(words: str, by_default: bool) -> None:
    known = known_tests()
    rows = table_after(words)
    assert len(rows) > 3
    for row in rows:
        named = re.findall(r"`(tests/\w+\.py|test_\w+)`", row)
        assert named, row
        assert [known.get(name) for name in named] == [by_default] * len(named), row


@pytest.mark.skipif(MLX_LM < (0, 32), reason="an architecture is left out with this mlx-lm")
def test_the_architectures_that_are_counted_are_tried() -> None:
    types = {name.split(" ")[0] for name in ARCHITECTURES}
    dense = {name for name in types if "moe" not in name}
    (row,) = (row for row in table_after(BY_DEFAULT) if "architectures" in row)
    assert [int(n) for n in re.findall(r"\d+", row)] == [len(types), len(dense)]
    assert len(types) - len(dense) == 1


def test_no_test_skips_for_data_that_a_clone_lacks() -> None:
    """What a test compares with is in the repository, made here, or fetched as the model is."""
    outside = re.compile(r"parents\[[2-9]\]")
    for path in TESTS.glob("*.py"):
        if path != Path(__file__):
            assert not outside.search(path.read_text(encoding="utf-8")), path.name
