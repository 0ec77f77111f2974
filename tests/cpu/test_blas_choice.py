"""Which BLAS a process loads on a machine that has several."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fresh_process import python

from redrafter_mlx import BLAS
from redrafter_mlx.cli.doctor import blas_choice
from redrafter_mlx.cli.doctor import command as doctor
from redrafter_mlx.cli.doctor.blas_choice import compare_libraries
from redrafter_mlx.cli.options import ModelOptions
from redrafter_mlx.cpu.blas import libraries_here, prefer_library, preferred_library
from redrafter_mlx.errors import BusyError
from redrafter_mlx.runtime.device import backend

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or backend() != "cpu", reason="BLAS is chosen on Linux CPUs only"
)

RATES = {"slow.so": [20.0], "fast.so": [30.0, 30.0], "close.so": [29.0, 31.0], "broken.so": [None]}
"""Rates in the first measurement, and in the others if they differ."""

NEVER, BUSY = "endless.so", "busy.so"
"""A library whose measurement does not end."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path))
    monkeypatch.delenv("REDRAFTER_BLAS", raising=False)


def compared(*libraries: str, again: bool = False) -> tuple[str | None, list[str]]:
    """Return which of these libraries is chosen, and which were measured.

    The model is fetched once before measurements, and not at all without any.
    """
    measured: list[str] = []
    fetched: list[str | None] = []

    def rate_with(library: str, _: ModelOptions, longest: float) -> float | None:
        measured.append(library)
        if library == NEVER:
            raise subprocess.TimeoutExpired("tune", longest)
        if library == BUSY:
            raise BusyError("busy")
        rates = RATES[library]
        return rates[min(measured.count(library), len(rates)) - 1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blas_choice, "libraries_here", lambda: libraries)
        patch.setattr(blas_choice, "rate_with", rate_with)
        patch.setattr(blas_choice, "resolve", lambda name, **_: fetched.append(name))
        chosen = compare_libraries(ModelOptions(), again, lambda _: None)
    assert len(fetched) == bool(measured)
    return chosen, measured


def test_the_fastest_of_several_is_preferred_and_not_measured_again() -> None:
    assert compared("slow.so", "fast.so", "broken.so")[0] == "fast.so"
    assert preferred_library() == "fast.so"
    assert compared("slow.so", "fast.so") == (None, [])
    assert compared("slow.so", "fast.so", again=True)[1] == ["slow.so", "fast.so"]


def test_libraries_with_similar_rates_are_measured_twice_in_turn() -> None:
    measured = ["slow.so", "fast.so", "close.so", "fast.so", "close.so"]
    assert compared("slow.so", "fast.so", "close.so") == ("close.so", measured)


def test_a_library_alone_and_one_that_was_named_are_no_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert compared("slow.so") == (None, [])
    monkeypatch.setenv("REDRAFTER_BLAS", "slow.so")
    assert compared("slow.so", "fast.so") == (None, [])
    assert preferred_library() is None


def test_nothing_is_preferred_where_no_library_could_be_measured() -> None:
    assert compared("broken.so", "broken.so")[0] is None
    assert preferred_library() is None


def test_a_library_whose_measurement_does_not_end_is_given_up() -> None:
    assert compared(NEVER, "slow.so", NEVER, "fast.so") == (
        "fast.so",
        [NEVER, "slow.so", NEVER, "fast.so"],
    )
    assert compared(NEVER, NEVER, again=True)[0] is None


def test_a_machine_that_is_too_busy_to_be_measured_chooses_nothing() -> None:
    """A library that was measured in a quiet moment is not the fastest for that."""
    assert compared("slow.so", BUSY, "fast.so") == (None, ["slow.so", BUSY])
    assert preferred_library() is None


def test_a_process_tells_that_the_machine_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its exit status: its other failures are of the library."""
    monkeypatch.setattr(blas_choice, "ARGUMENTS", ["-c", f"exit({blas_choice.BUSY})"])
    with pytest.raises(BusyError):
        blas_choice.rate_with("a.so", ModelOptions(), 20)
    monkeypatch.setattr(blas_choice, "ARGUMENTS", ["-c", "exit(1)"])
    assert blas_choice.rate_with("a.so", ModelOptions(), 20) is None


def test_a_measurement_is_ended_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas_choice.sys, "executable", "/bin/sleep")
    monkeypatch.setattr(blas_choice, "ARGUMENTS", ["60"])
    with pytest.raises(subprocess.TimeoutExpired):
        blas_choice.rate_with("slow.so", ModelOptions(), 0.2)


@pytest.mark.skipif(BLAS.library is None, reason="no optimised BLAS is loaded")
def test_a_new_process_loads_the_preferred_library_and_another_where_it_is_gone() -> None:
    show = "import redrafter_mlx; print(redrafter_mlx.BLAS.library, redrafter_mlx.BLAS.note)"
    here = libraries_here()
    prefer_library(here[-1])
    library, note = python(show).split(" ", 1)
    assert library == here[-1]
    assert "tune" in note
    prefer_library("libgone.so")
    library, note = python(show).split(" ", 1)
    assert library == here[0]
    assert "redrafter-mlx tune" not in note


@pytest.mark.skipif(BLAS.library is None, reason="no optimised BLAS is loaded")
def test_a_library_of_several_names_is_listed_once() -> None:
    code = (
        "import ctypes; from redrafter_mlx.cpu.blas import libraries_here as here\n"
        "print(len({ctypes.CDLL(x)._handle for x in here()}) == len(here()) >= 1)"
    )
    assert python(code) == "True"


def test_the_fastest_is_used_where_the_choice_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path / "file"))
    assert compared("slow.so", "fast.so")[0] == "fast.so"


def test_doctor_names_a_faster_library_only_where_none_was_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def choice(chip: str, *here: str) -> str | None:
        monkeypatch.setattr(doctor, "libraries_here", lambda: here)
        return doctor.blas_facts(chip)

    assert "tune" in str(choice("Intel Xeon", "libmkl_rt.so.3", "libblis.so.4"))
    assert "libblis4-openmp" in str(choice("AMD EPYC", "libmkl_rt.so.3"))
    assert choice("AMD EPYC", "libblis.so.4") is None
    assert choice("Intel Xeon", "libmkl_rt.so.3") is None
    prefer_library("libmkl_rt.so.3")
    assert choice("AMD EPYC", "libmkl_rt.so.3", "libblis.so.4") is None
