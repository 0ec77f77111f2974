"""Processor time that a virtual machine's host gave to others."""

from __future__ import annotations

from pathlib import Path

import pytest

from redrafter_mlx.runtime import stolen_time
from redrafter_mlx.runtime.stolen_time import ProcessorTime


@pytest.fixture
def statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file that stands for the kernel's."""
    file = tmp_path / "stat"
    monkeypatch.setattr(stolen_time, "_STATISTICS", file)
    return file


def of(used: int, stolen: int) -> str:
    """Return the kernel's first line, with idle and waiting time that does not count."""
    return f"cpu  {used - 6} 1 2 99999 777 1 2 {stolen} 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n"


@pytest.mark.parametrize(("stolen", "share"), [(0, None), (4, None), (25, "20%"), (300, "75%")])
def test_a_measurement_names_the_share_of_time_that_others_had(
    statistics: Path, stolen: int, share: str | None
) -> None:
    statistics.write_text(of(1000, 5000))
    before = ProcessorTime.now()
    assert before == (1000, 5000)
    statistics.write_text(of(1100, 5000 + stolen))
    note = before.note()
    assert (note is None) if share is None else share in str(note)


@pytest.mark.parametrize("text", [None, "", "cpu 1 2 3\n", "cpu a b c d e f g h\n"])
def test_nothing_is_said_where_the_time_is_unknown(statistics: Path, text: str | None) -> None:
    if text is not None:
        statistics.write_text(text)
    assert ProcessorTime.now() == (0, 0)
    assert ProcessorTime.now().note() is None
