"""The log of a training run: each step once, even after interruptions, and its pictures."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from redrafter_mlx.distill.evaluation.acceptance import DraftQuality
from redrafter_mlx.distill.report.metrics import METRICS, MetricsLog, best_quality, read_metrics
from redrafter_mlx.distill.report.plots import ACCURACY, LOSS, draw_plots, running_mean
from redrafter_mlx.distill.training.learner import Step
from redrafter_mlx.distill.training.trainer import Evaluation, Event
from redrafter_mlx.errors import DamagedFileError
from redrafter_mlx.runtime.files.atomic_write import atomic_write, write_private_text

PNG = b"\x89PNG\r\n\x1a\n"


def step(n: int, loss: float = 5.25) -> Step:
    return Step(n, 100, loss, 1e-3 / n, 830.5)


def evaluation(n: int, best: bool = True) -> Evaluation:
    quality = DraftQuality(
        (0.4, 0.3), (0.7, 0.6), {1: 1.5, 4: 2.0}, {1: (0.5, 0.25), 4: (0.75, 0.5)}
    )
    return Evaluation(n, quality, best)


def run(first: int, last: int) -> list[Event]:
    """Log the steps from `first` to `last`, with an evaluation after every third."""
    events: list[Event] = []
    for n in range(first, last + 1):
        events.append(step(n, loss=10 / n))
        if n % 3 == 0:
            events.append(evaluation(n, best=n % 2 == 0))
    return events


def write(folder: Path, events: list[Event], steps_made: int = 0) -> None:
    with MetricsLog(folder, steps_made) as log:
        for event in events:
            log.append(event)


def read(folder: Path) -> list[tuple[str, int]]:
    """Return kind and step of each event in the log."""
    return [(record["event"], record["step"]) for record in read_metrics(folder)]


def named(events: list[Event]) -> list[tuple[str, int]]:
    """Return kind and step of these events."""
    return [("step" if isinstance(e, Step) else "evaluation", e.step) for e in events]


# The log


def test_the_quality_of_the_saved_drafter_is_read_back(tmp_path: Path) -> None:
    write(tmp_path, [evaluation(1), step(2), replace(evaluation(3), best=False)])
    assert best_quality(tmp_path) == evaluation(1).quality


def test_a_log_that_was_removed_does_not_hold_the_quality_of_the_drafter(tmp_path: Path) -> None:
    assert best_quality(tmp_path) is None
    write(tmp_path, [step(1), replace(evaluation(1), best=False)])
    assert best_quality(tmp_path) is None


def test_an_evaluation_without_figures_is_an_error_that_names_the_log(tmp_path: Path) -> None:
    write(tmp_path, [evaluation(1)])
    log = tmp_path / METRICS
    log.write_text(log.read_text().replace('"top5"', '"five"'))
    with pytest.raises(DamagedFileError, match=rf"{METRICS} cannot be used.*move it away"):
        best_quality(tmp_path)


def test_each_line_is_strict_json_with_its_event_and_step(tmp_path: Path) -> None:
    write(tmp_path, [step(1, math.nan), step(2, math.inf), evaluation(2)])
    lines = (tmp_path / METRICS).read_text().splitlines()
    records = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [(s["event"], s["step"]) for s in records] == [
        ("step", 1),
        ("step", 2),
        ("evaluation", 2),
    ]
    assert records[0]["loss"] is None
    assert records[2]["tokens_per_step"] == {"1": 1.5, "4": 2.0}


def test_a_line_is_in_the_file_before_the_next_event(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        for n in range(1, 4):
            log.append(step(n))
            assert len(read(tmp_path)) == n


@pytest.mark.parametrize("checkpoint", [1, 3, 10])
def test_resumed_log_equals_the_unbroken_one(tmp_path: Path, checkpoint: int) -> None:
    """Each step is logged once, independent of the last checkpoint's step."""
    write(tmp_path, run(1, 10))
    write(tmp_path, run(checkpoint + 1, 20), steps_made=checkpoint)
    assert read(tmp_path) == named(run(1, 20))


def test_new_run_begins_an_empty_log(tmp_path: Path) -> None:
    write(tmp_path, run(1, 10))
    write(tmp_path, run(1, 2))
    assert read(tmp_path) == named(run(1, 2))


def test_a_checkpoint_ahead_of_the_log_appends_to_it(tmp_path: Path) -> None:
    """After a power cut the checkpoint may include steps that the log has lost."""
    write(tmp_path, run(1, 5))
    write(tmp_path, run(9, 10), steps_made=8)
    assert read(tmp_path) == named([*run(1, 5), *run(9, 10)])


def test_seconds_go_on_where_the_run_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("redrafter_mlx.distill.report.metrics.time.monotonic", lambda: now[0])
    with MetricsLog(tmp_path) as log:
        for n in (1, 2, 3):
            now[0] += 10
            log.append(step(n))
    now[0] += 5000
    with MetricsLog(tmp_path, steps_made=2) as log:
        now[0] += 1
        log.append(step(3))
    assert [record["seconds"] for record in read_metrics(tmp_path)] == [10, 20, 21]


@pytest.mark.parametrize("cut", [1, 60])
def test_half_written_last_line_is_removed(tmp_path: Path, cut: int) -> None:
    path = tmp_path / METRICS
    write(tmp_path, run(1, 4))
    whole = path.read_bytes()
    write(tmp_path, [step(5)], steps_made=4)
    path.write_bytes(path.read_bytes()[: len(whole) + cut])
    assert read(tmp_path) == named(run(1, 4))
    write(tmp_path, run(5, 6), steps_made=4)
    assert read(tmp_path) == named(run(1, 6))


def test_zeros_after_the_last_line_are_removed(tmp_path: Path) -> None:
    """Some file systems leave zeros after an unfinished write."""
    path = tmp_path / METRICS
    write(tmp_path, run(1, 4))
    whole = path.read_bytes()
    path.write_bytes(whole + bytes(4096))
    assert read(tmp_path) == named(run(1, 4))
    write(tmp_path, [], steps_made=4)
    assert path.read_bytes() == whole


def test_line_that_lacks_only_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    write(tmp_path, run(1, 4))
    path.write_bytes(path.read_bytes()[:-1])
    write(tmp_path, run(5, 5), steps_made=4)
    assert read(tmp_path) == named(run(1, 5))


@pytest.mark.parametrize(
    "line",
    [
        b"not JSON",
        b"",
        b"[1, 2]",
        b'{"event": "other", "step": 1}',
        b'{"event": "step", "step": 1}',
        b'{"event": "step", "step": 1, "seconds": null}',
        b'{"event": "step", "step": 1, "seconds": NaN}',
        b'{"event": "step", "step": "one", "seconds": 1.0}',
    ],
)
def test_log_that_is_not_ours_is_refused_by_line_and_kept(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / METRICS
    write(tmp_path, run(1, 2))
    path.write_bytes(path.read_bytes() + line + b"\n")
    before = path.read_bytes()
    for attempt in (lambda: read_metrics(tmp_path), lambda: MetricsLog(tmp_path)):
        with pytest.raises(DamagedFileError, match=r"metrics\.jsonl: line 3 is no event"):
            attempt()
    assert path.read_bytes() == before


# Atomic writes


def test_a_small_text_file_is_its_owners_alone(tmp_path: Path) -> None:
    """Conversations are stored in such files, so the umask must not expose them."""
    path = tmp_path / "new" / "chat.json"
    for text in ("first", "second"):
        write_private_text(path, text)
        assert path.read_text() == text
        assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_interrupted_file_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_text("old")

    def interrupted() -> None:
        with atomic_write(path) as partial:
            partial.write_text("half of the ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["picture.png"]
    with atomic_write(path) as partial:
        assert partial.suffix == ".png"
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["picture.png"]


# Pictures


@pytest.mark.parametrize("window", [1, 2, 3, 10])
def test_running_mean_equals_the_mean_of_each_window(window: int) -> None:
    values = [4.0, 1.0, math.nan, 3.0, math.nan, math.nan, math.nan, 2.0]
    expected = []
    for at in range(len(values)):
        known = [v for v in values[max(0, at - window + 1) : at + 1] if not math.isnan(v)]
        expected.append(sum(known) / len(known) if known else math.nan)
    np.testing.assert_allclose(running_mean(values, window), expected)


def test_pictures_are_drawn_of_what_there_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert draw_plots(tmp_path) is None
    assert os.listdir(tmp_path) == []
    write(tmp_path, [step(1), step(2, math.nan)])
    assert draw_plots(tmp_path) is None
    assert sorted(os.listdir(tmp_path)) == [LOSS, METRICS]
    write(tmp_path, run(3, 6), steps_made=2)
    assert draw_plots(tmp_path) is None
    assert sorted(os.listdir(tmp_path)) == sorted([ACCURACY, LOSS, METRICS])
    for name in (LOSS, ACCURACY):
        assert (tmp_path / name).read_bytes().startswith(PNG)


def test_pictures_show_every_position_and_width(tmp_path: Path) -> None:
    """The drawn lines are the log's numbers."""
    pytest.importorskip("matplotlib")
    from redrafter_mlx.distill.report.plots import accuracy_figure, loss_figure

    write(tmp_path, [step(1, 3.0), step(2, 2.0), evaluation(10), evaluation(20, best=False)])
    steps, evaluations = read_metrics(tmp_path)[:2], read_metrics(tmp_path)[2:]
    left, right = accuracy_figure(evaluations).axes
    assert [list(line.get_ydata()) for line in left.lines] == [[0.4, 0.4], [0.3, 0.3]]
    drawn = {str(line.get_label()): list(line.get_ydata()) for line in right.lines}
    assert drawn["beam width 1"] == [1.5, 1.5]
    assert drawn["beam width 4"] == [2.0, 2.0]
    assert list(right.lines[-1].get_xdata()) == [10, 10]  # the saved one
    assert list(loss_figure(steps).axes[0].lines[0].get_ydata()) == [3.0, 2.0]


def test_missing_matplotlib_is_one_line_that_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, run(1, 4))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    note = draw_plots(tmp_path)
    assert note is not None
    assert "pip install 'redrafter-mlx[plot]'" in note
    assert "\n" not in note
    assert os.listdir(tmp_path) == [METRICS]


def test_picture_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write(tmp_path, run(1, 4))
    (tmp_path / LOSS).mkdir()
    note = draw_plots(tmp_path)
    assert note is not None
    assert str(tmp_path) in note
    assert sorted(os.listdir(tmp_path)) == [LOSS, METRICS]
