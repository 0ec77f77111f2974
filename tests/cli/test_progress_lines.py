"""Progress lines of long work, for output without a terminal's progress bars."""

from __future__ import annotations

import io
import logging
import re
import sys
import time
from inspect import signature

import pytest
from rich.console import Console
from screens import Screen
from waiting import wait_for

from redrafter_mlx.cli.progress import (
    Stage,
    describe_count,
    duration,
    progress_bars,
    progress_lines,
)
from redrafter_mlx.cli.train.screen import stage


def terminal(monkeypatch: pytest.MonkeyPatch, columns: int = 100) -> Screen:
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    return screen


def bars(monkeypatch: pytest.MonkeyPatch, *given: object) -> str:
    """Return what a terminal shows while half of some work is done."""
    screen = terminal(monkeypatch)
    with progress_bars("working", *given) as progress:  # type: ignore[arg-type]
        progress("parts", 500, 1000)
    return screen.getvalue()


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_a_long_label_takes_no_room_from_the_bar_and_the_amount(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = terminal(monkeypatch, columns)
    with progress_bars(f"measuring {'long/' * 12}", describe_count) as progress:
        progress(f"downloading [x] {'long-' * 8}", 500, 1000)
    shown = screen.getvalue()
    assert "downloading [x]" in shown
    assert "500 of 1000" in shown
    assert "━" * 8 in shown


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_training_shows_bar_count_time_left_and_note_however_narrow_the_terminal_is(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = terminal(monkeypatch, columns)
    console = Console(stderr=True, soft_wrap=True)
    with stage(console, "writing the corpus", "tokens", 2_000_000) as update:
        update(1_234_567, note=f"1234 texts, {'more, ' * 20}")
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    lines = shown.replace("\r", "\n").splitlines()
    last = next(line for line in reversed(lines) if "writing the corpus ━" in line)
    assert last.endswith("1234567/2000000 tokens, -:--:-- left")
    assert "  1234 texts" in shown
    assert max(map(len, lines)) <= columns


def test_a_stage_of_training_that_is_not_counted_shows_on_a_terminal_that_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = terminal(monkeypatch)
    with stage(Console(stderr=True), "planning"):
        pass
    assert "planning" in screen.getvalue()


def test_bars_show_the_amount_of_what_is_counted_and_of_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The line above them has no total."""
    assert "500 of 1000" in bars(monkeypatch, describe_count)
    assert "500 bytes of 1 kB" in bars(monkeypatch)
    percent = bars(monkeypatch, lambda done, _: f"{done}%")
    assert "500%" in percent
    assert " 0%" not in percent


def test_off_a_terminal_a_large_download_is_logged_and_counts_are_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with caplog.at_level(logging.WARNING), progress_bars("asking", describe_count) as progress:
        progress("downloading x", 0, 10**9)
    assert not caplog.records
    with caplog.at_level(logging.WARNING), progress_bars("loading") as progress:
        progress("downloading x", 0, 10**9)
    assert "downloading x" in caplog.text


def test_off_a_terminal_work_that_takes_long_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Not one for each question; standard output stays for the result."""
    now = 100.0
    with progress_bars("measuring", describe_count, lambda: now) as progress:
        for done in range(1, 101):
            now += 1.0
            progress("answers", done, 100)
    shown = capsys.readouterr()
    assert not shown.out
    lines = shown.err.splitlines()
    assert lines == [f"measuring: answers, {done} of 100" for done in (30, 60, 90)]


def test_a_line_has_what_is_done_and_the_time_to_go() -> None:
    now = 100.0
    stage = Stage("writing", "tokens", 9000, clock=lambda: now)
    assert "0 of 9,000 tokens" in stage.line()
    stage.update(1000)
    now += 120
    assert "not known" in stage.line()
    stage.update(3000, note="7 texts")
    assert stage.line() == "writing: 3,000 of 9,000 tokens, 7 texts, about 6 min to go"


@pytest.mark.parametrize("unit", ["", "tokens"])
def test_no_line_of_a_stage_repeats_the_one_before(unit: str) -> None:
    now = 0.0
    stage, lines = Stage("planning", unit, 9000, clock=lambda: now), []
    for now in (30.0, 60.0, 90.0):  # noqa: B007
        lines.append(stage.line())
    assert len({*lines}) == 3


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
    assert all(re.fullmatch(r"loading \.\.\. \d+ s so far", line) for line in lines)
    assert signature(progress_lines).parameters["every"].default <= 30


def test_durations_are_in_hours_and_minutes() -> None:
    assert [duration(s) for s in (0, 95, 3600, 7500)] == [
        "about 1 min", "about 2 min", "about 1 h 0 min", "about 2 h 5 min",
    ]  # fmt: skip
