"""A machine that was busy while something was measured is named with the figures."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from redrafter_mlx.runtime import busy_machine
from redrafter_mlx.runtime.busy_machine import BusyMachine

TICK = os.sysconf("SC_CLK_TCK")


@pytest.fixture
def statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file that stands for the kernel's, on a machine with two cores."""
    file = tmp_path / "stat"
    monkeypatch.setattr(busy_machine, "STATISTICS", file)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    return file


class Clocks:
    """The clock and the process's time, moved by a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.own = 50.0, 3.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.clock)
        monkeypatch.setattr(time, "process_time", lambda: self.own)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


def of(used: int, stolen: int) -> str:
    """Return the kernel's first line, with idle and waiting time that does not count."""
    return f"cpu  {used - 6} 1 2 99999 777 1 2 {stolen} 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n"


@pytest.mark.parametrize(("stolen", "share"), [(0, None), (4, None), (25, "20%"), (300, "75%")])
def test_a_measurement_names_the_share_of_time_that_the_host_gave_to_others(
    statistics: Path, stolen: int, share: str | None
) -> None:
    statistics.write_text(of(1000, 5000))
    machine = BusyMachine(computes=False, shared=True)
    with machine.watched():
        statistics.write_text(of(1100, 5000 + stolen))
    assert [share in note for note in machine.notes()] == ([] if share is None else [True])


@pytest.mark.parametrize(
    ("own", "others", "computes", "named"),
    [
        (0.06, 0.0, True, "6% of a core"),
        (0.06, 0.0, False, None),
        (1.7, 0.1, True, None),
        (1.0, 0.9, True, "others had 0.9"),
        (0.3, 0.9, False, "others had 0.9"),
    ],
)
def test_a_measurement_names_a_process_that_hardly_got_a_core(
    statistics: Path, clocks: Clocks, own: float, others: float, computes: bool, named: str | None
) -> None:
    """Each of two cores gives 100 s in 100 s; where a GPU computes, the process may wait for it."""
    statistics.write_text(of(1000, 0))
    machine = BusyMachine(computes=computes)
    with machine.watched():
        clocks.clock, clocks.own = clocks.clock + 100, clocks.own + 100 * own
        statistics.write_text(of(1000 + round(100 * TICK * (own + others)), 0))
    notes = machine.notes()
    assert [named in note for note in notes] == ([] if named is None else [True])
    assert all("unreliable" in note for note in notes)


def test_only_what_was_watched_counts_and_rest_does_not(
    statistics: Path, clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading waits for the disk; `statistics` is not there, as on a Mac."""
    del statistics
    machine = BusyMachine(computes=True)
    clocks.clock += 1000
    for _ in range(2):
        with machine.watched():
            clocks.clock, clocks.own = clocks.clock + 100, clocks.own + 50
    assert "50% of a core" in machine.notes()[0]
    monkeypatch.setattr(time, "sleep", lambda _: None)
    machine.rest(100)
    assert machine.notes() == []


def test_an_interrupted_measurement_counts(statistics: Path, clocks: Clocks) -> None:
    del statistics
    machine = BusyMachine(computes=True)

    def measure() -> None:
        with machine.watched():
            clocks.clock += 10
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure()
    assert len(machine.notes()) == 1


@pytest.mark.parametrize("text", [None, "", "cpu 1 2 3\n", "cpu a b c d e f g h\n"])
def test_nothing_is_said_where_the_time_is_unknown(statistics: Path, text: str | None) -> None:
    if text is not None:
        statistics.write_text(text)
    machine = BusyMachine(computes=False)
    with machine.watched():
        pass
    assert machine.notes() == []
