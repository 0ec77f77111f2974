"""Imports the package before any test imports MLX, so that the optimised BLAS is used."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace

import pytest
from simulated import cliff, timings_of_batches

import redrafter_mlx  # noqa: F401
from redrafter_mlx.autotune.cost_model import Setup, Timings
from redrafter_mlx.autotune.learned import Learned
from redrafter_mlx.loading.target import LoadedTarget, load_target

# MLX's CPU backend compiles kernels into files there, and two processes must not write the same.
SCRATCH = tempfile.mkdtemp(prefix="redrafter-mlx-tests-")
os.chmod(SCRATCH, 0o755)  # tests read files as another user
os.environ["TMPDIR"] = SCRATCH


def pytest_unconfigure() -> None:
    shutil.rmtree(SCRATCH, ignore_errors=True)


@pytest.fixture(autouse=True)
def known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a made-up cost model: no test waits for measurements, or leaves them in the user's cache.

    Nor does a test start with what an earlier one has learned.
    """
    known = timings_of_batches(cliff(8))

    def saved(setup: Setup) -> Timings:
        return replace(known, setup=setup)

    monkeypatch.setattr("redrafter_mlx.autotune.tuner.saved_timings", saved)
    monkeypatch.setattr("redrafter_mlx.autotune.tuner.saved_learned", lambda *_: Learned())
    monkeypatch.setattr("redrafter_mlx.autotune.tuner.save_learned", lambda *_: None)


@pytest.fixture(scope="session")
def smollm2_float32() -> LoadedTarget:
    """The real SmolLM2-135M, loaded once for all tests."""
    return load_target("smollm2-135m", dtype="float32")
