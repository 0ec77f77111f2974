"""The papers' figures in `bench/papers/data/`, compared with the list that they were read into.

Run with `-m parity`. The list lies beside the repository, or at $PUBLISHED_FIGURES.
"""

from __future__ import annotations

import os
import re
from itertools import groupby
from pathlib import Path

import pytest
from places import ROOT

from redrafter_mlx.bench.papers.published import published

BESIDE = ROOT.parent / "shared/data/paper/published_more.md"
LIST = Path(os.environ.get("PUBLISHED_FIGURES", BESIDE))

pytestmark = pytest.mark.parity


@pytest.fixture(autouse=True)
def listed() -> None:
    if not LIST.is_file():
        pytest.skip(f"{LIST} is not on this machine")


def figures_of(*titles: str) -> list[str]:
    """Return the numbers with decimals, and OOM, in the list's entries, in order."""
    text = LIST.read_text(encoding="utf-8")
    found: list[str] = []
    for title in titles:
        (entry,) = re.findall(rf"^- \*\*{re.escape(title)}\*\*(.*)$", text, re.MULTILINE)
        text_of = entry if "Figure" in title else entry.partition("): ")[2]
        found += re.findall(r"\d+\.\d+|OOM", text_of)
    return found


def numbers(values: list[str]) -> list[float | str]:
    return [value if value == "OOM" else float(value) for value in values]


def entered(name: str, *columns: str) -> list[float | str]:
    """Return the numbers in some columns of a published table, row by row."""
    cells = [str(r[column]) for r in published(name).records() for column in columns]
    return numbers([n for cell in cells for n in re.findall(r"\d+\.\d+|OOM", cell)])


@pytest.mark.parametrize(
    ("name", "titles", "columns"),
    [
        ("table3", ["000 Table 3"], ["tok/s each"]),
        ("table4", ["000 Table 4"], ["speedup", "tokens/step"]),
        ("review-table2", ["003 Table 2"], ["ms a token", "speedup"]),
        ("review-table3", ["003 Table 3"], ["tok/s", "speedup"]),
        ("v1-table1", ["001 Table 1, Vicuna 7B", "001 Table 1, Vicuna 13B"],
         ["size", "tok/s", "tokens/step", "speedup", "quality"]),
        ("v1-table2", ["001 Table 2, rejection sampling", "001 Table 2, typical acceptance"],
         ["T", "over greedy", "quality"]),
    ],
)  # fmt: skip
def test_published_figures_are_those_that_were_read(
    name: str, titles: list[str], columns: list[str]
) -> None:
    assert entered(name, *columns) == numbers(figures_of(*titles))


def test_the_review_versions_methods_are_those_that_were_read_and_others_are_not_readable() -> None:
    read = numbers(figures_of("003 Table 1 at T 1"))
    assert entered("review-table1", "speedup", "tokens/step") == read
    lost = [r for r in published("review-table1").records() if r["speedup"] == "not readable"]
    assert {(r["questions"], r["method"]) for r in lost} == {
        ("MT-Bench", "Medusa"), ("MT-Bench", "EAGLE"),
    }  # fmt: skip


@pytest.mark.parametrize(("name", "title"), [("speculators-table1", "002 Table 1"),
                                             ("speculators-table2", "002 Table 2")])  # fmt: skip
def test_milliseconds_are_those_that_were_read_with_the_tokens_a_step_of_their_prompts(
    name: str, title: str
) -> None:
    rows: list[float | str] = []
    for _, group in groupby(published(name).records(), lambda r: r["prompt tokens"]):
        records = [*group]
        rows += [float(r["ms a token"] or 0) for r in records]
        rows += [float(r["tokens/step"] or 0) for r in records if r["requests"] == 1]
        steps = {(r["k"], r["tokens/step"]) for r in records}
        assert len(steps) == len({k for k, _ in steps}), "one figure for all batch sizes"
    text = LIST.read_text(encoding="utf-8")
    (entry,) = re.findall(rf"^- \*\*{title}\*\*(.*)$", text, re.MULTILINE)
    assert rows == numbers(re.findall(r"\d+\.\d+", entry))


def test_correlations_and_sizes_are_those_that_were_read() -> None:
    assert entered("v1-figure4", "correlation") == numbers(figures_of("001 Figure 4"))[:2]
    sizes = LIST.read_text(encoding="utf-8").partition("**Figure 3**")[2].partition("**")[0]
    assert entered("v1-figure3", "size") == numbers(re.findall(r"\d+\.\d+", sizes))
