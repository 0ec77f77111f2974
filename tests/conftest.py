"""Imports the package before any test imports MLX, so that the optimised BLAS is used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import mlx
import pytest
from command_line import CommandLine
from places import SUPPORT, SUPPORT_PATH
from simulated import cliff, machine_of_batches

import redrafter_mlx  # noqa: F401
from redrafter_mlx.loading.target import LoadedTarget, load_target
from redrafter_mlx.tuning.cost import Setup
from redrafter_mlx.tuning.store import Record

# MLX's CPU backend compiles kernels into files there, and two processes must not write the same.
SCRATCH = tempfile.mkdtemp(prefix="redrafter-mlx-tests-")
os.chmod(SCRATCH, 0o755)  # tests read files as another user
os.environ["TMPDIR"] = SCRATCH

# Child processes import what tests share.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [*SUPPORT_PATH, *filter(None, [os.environ.get("PYTHONPATH")])]
)


def share_kernels(gxx: str) -> None:
    """Let all processes of this run compile each kernel once, see bin/g++."""
    folder = Path(SCRATCH, "kernels")
    (package,) = mlx.__path__
    include = Path(package, "include")
    header = Path("mlx", "backend", "cpu", "compiled_preamble.h")
    (folder / header).parent.mkdir(parents=True)
    options = ["-std=c++17", "-O3", "-fPIC", "-shared", "-w", "-I", include]
    output = folder / f"{header}.gch"
    line = [gxx, *options, "-x", "c++-header", include / header, "-o", output]
    subprocess.run([*map(str, line)], check=True)
    tools = SUPPORT / "bin"
    path = os.pathsep.join((str(tools), os.environ["PATH"]))
    os.environ.update(KERNELS=str(folder), REAL_GXX=gxx, PATH=path)


SLOW = Path(__file__).with_name("slow.txt")
GXX = shutil.which("g++")
if sys.platform == "linux" and GXX and "KERNELS" not in os.environ:  # once, not in each worker
    share_kernels(GXX)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Let each of several processes multiply with one thread: more would take turns."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that took long, see `support/by_hand/slow_tests.py`."""
    slow = {*SLOW.read_text(encoding="utf-8").split()}
    for item in items:
        if item.nodeid.partition("[")[0] in slow:
            item.add_marker("slow")


def pytest_unconfigure() -> None:
    shutil.rmtree(SCRATCH, ignore_errors=True)


@pytest.fixture(autouse=True)
def known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a made-up cost model: no test waits for measurements, or leaves them in the user's cache.

    Nor does a test start with what an earlier one has learned.
    """
    known = machine_of_batches(cliff(8))

    def saved(setup: Setup, values: str) -> Record:
        del values
        return Record(replace(known, setup=setup))

    monkeypatch.setattr("redrafter_mlx.tuning.tuner.saved_record", saved)
    monkeypatch.setattr("redrafter_mlx.tuning.tuner.save_record", lambda *_, **__: True)


@pytest.fixture(autouse=True)
def no_successors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be read while a model is idle: drafts would depend on how long a test takes."""
    monkeypatch.setattr("redrafter_mlx.loading.load.table_of", lambda *_: None)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture(scope="session")
def smollm2_float32() -> LoadedTarget:
    """The real SmolLM2-135M, loaded once for all tests."""
    return load_target("smollm2-135m", dtype="float32")
