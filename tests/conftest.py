"""Imports the package before any test imports MLX, so that the optimised BLAS answers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulated import cliff, machine

import redrafter_mlx  # noqa: F401
from redrafter_mlx.autotune.cost_model import CostCurves, Setup


@pytest.fixture(autouse=True)
def known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up machine: no test waits for measurements, or leaves them in the user's cache."""
    curves = machine(cliff(8))

    def saved(setup: Setup) -> CostCurves:
        return replace(curves, setup=setup)

    monkeypatch.setattr("redrafter_mlx.autotune.tuner.saved_curves", saved)
