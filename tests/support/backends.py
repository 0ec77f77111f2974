"""Marks of tests that hold on some backends only."""

from __future__ import annotations

import pytest

from redrafter_mlx.runtime.device import backend

frees_at_once = pytest.mark.skipif(
    backend() != "cpu", reason="a GPU frees what a call read some time after its results are there"
)
"""Of tests that compare the memory at its peak with what must be held."""
