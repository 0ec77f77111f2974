"""Progress lines of long work, for output without a terminal's progress bars."""

from __future__ import annotations

import time
from inspect import signature

from waiting import wait_for

from redrafter_mlx.cli.progress import Stage, duration, progress_lines


def test_a_line_has_what_is_done_and_the_time_to_go() -> None:
    now = 100.0
    stage = Stage("writing", "tokens", 9000, clock=lambda: now)
    assert "0 of 9,000 tokens" in stage.line()
    stage.update(1000)
    now += 120
    assert "not known" in stage.line()
    stage.update(3000, note="7 texts")
    assert stage.line() == "writing: 3,000 of 9,000 tokens, 7 texts, about 6 min to go"


def test_what_was_done_before_counts_in_no_rate() -> None:
    now = 0.0
    stage = Stage("training", "steps", clock=lambda: now)
    now += 1000
    stage.update(500, 600)
    now += 60
    stage.update(550, 600)
    assert stage.line().endswith("about 1 min to go")


def test_lines_come_while_nothing_is_done_and_end_with_the_stage() -> None:
    lines: list[str] = []
    with progress_lines(Stage("loading"), lines.append, every=0.01):
        wait_for(lambda: len(lines) >= 3)
    written = len(lines)
    time.sleep(0.05)
    assert len(lines) == written
    assert set(lines) == {"loading ..."}
    assert signature(progress_lines).parameters["every"].default <= 30


def test_durations_are_in_hours_and_minutes() -> None:
    assert [duration(s) for s in (0, 95, 3600, 7500)] == [
        "about 1 min", "about 2 min", "about 1 h 0 min", "about 2 h 5 min",
    ]  # fmt: skip
