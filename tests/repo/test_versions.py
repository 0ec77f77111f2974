"""MLX and mlx-lm, whose internals we use, have lower and upper bounds, which are tested."""

from __future__ import annotations

import re
from importlib.metadata import version

import pytest
from packaging.requirements import Requirement
from places import ROOT

PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
RANGES = [Requirement(line) for line in re.findall(r'"(mlx(?:-lm|\[\w+\])?[<>=][^"]*)"', PROJECT)]


def test_the_ranges_are_found() -> None:
    assert [r.name for r in RANGES].count("mlx-lm") == 1
    assert [r.name for r in RANGES].count("mlx") == 3, "Metal, CPU, CUDA"


@pytest.mark.parametrize("needed", RANGES, ids=str)
def test_versions_are_bounded_and_the_installed_one_is_within(needed: Requirement) -> None:
    assert {s.operator for s in needed.specifier} == {">=", "<"}
    assert needed.specifier.contains(version(needed.name), prereleases=True)
