"""Runs of `redrafter-mlx train` that are interrupted, resumed, or meet another run's files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console
from train_runs import TrainCommand, arguments, steps_logged
from waiting import wait_for

from redrafter_mlx.cli import main
from redrafter_mlx.cli.train.screen import fit
from redrafter_mlx.distill import run as run_module
from redrafter_mlx.distill.report.metrics import read_metrics
from redrafter_mlx.distill.training.checkpoint import Checkpoint, Progress, save_checkpoint
from redrafter_mlx.distill.training.learner import Step
from redrafter_mlx.runtime.files.atomic_write import locked


def test_ctrl_c_saves_and_the_same_command_resumes(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    output = tmp_path / "drafter"
    given = [*arguments(model, prompts, output), "--epochs", "12"]
    command = [sys.executable, "-m", "redrafter_mlx.cli.main", *given]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def training() -> bool:
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        return (output / "metrics.jsonl").exists() and len(read_metrics(output)) >= 5

    wait_for(training)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command resumes" in error
    assert "Traceback" not in error
    made = steps_logged(output)
    assert main.run(given) == 0
    steps = steps_logged(output)
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > len(made)


class PressedTwice:
    """A run that is interrupted in a step, and again while its state is saved."""

    saved = False

    def fit(self, stop: Callable[[], bool], _: Callable[[], float]) -> Iterator[Step]:
        os.kill(os.getpid(), signal.SIGINT)
        yield Step(1, 9, 0.5, 0.1, 100.0)
        assert stop()
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(3):
            time.sleep(0)
        self.saved = True


def test_ctrl_c_says_what_happens_and_another_one_waits_for_the_save(
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = PressedTwice()
    assert not fit(run.fit, Console(stderr=True))
    assert run.saved
    assert capfd.readouterr().err.count("stopping after this step and saving") == 1


def test_a_resumed_run_removes_what_it_half_wrote_and_nothing_else(
    train: TrainCommand, tmp_path: Path
) -> None:
    output = tmp_path / "drafter"
    train.run(output, "--epochs", "1")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for name in ("model.safetensors", "checkpoint.safetensors", "README.md", "loss.png"):
        (output / f".{ended.pid}-1.{name}").write_text("half")
    (output / ".notes").touch()
    (output / f".{os.getpid()}-1.train.toml").touch()  # is being written
    train.run(output, "--epochs", "1", "--dry-run")
    assert len([*output.glob(".*")]) == 6
    train.run(output, "--epochs", "1")
    assert {path.name for path in output.glob(".*")} == {".notes", f".{os.getpid()}-1.train.toml"}


def test_a_run_with_other_text_or_hours_is_refused_before_it_writes(
    train: TrainCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "drafter"
    train.run(output)

    def write(*_: object, **__: object) -> None:
        raise AssertionError("it writes")

    monkeypatch.setattr(run_module, "write_corpus", write)
    for option, value, named in (
        ("--answer-tokens", "100000", "answer_tokens"),
        ("--quantize", "4", "target"),
        ("--hours", "8", "--hours"),
    ):
        assert named in train.refused(output, option, value)


def test_files_of_another_run_or_of_none_are_not_written_over(
    train: TrainCommand, tmp_path: Path
) -> None:
    other, none = tmp_path / "other", tmp_path / "none"
    other.mkdir()
    save_checkpoint(Checkpoint({}, {}, {"target": "sha256:0"}, Progress(1, 0, 1)), other)
    none.mkdir()
    (none / "README.md").write_text("mine")
    assert "a run with target 'sha256:0'" in train.refused(other)
    assert "README.md" in train.refused(none)
    assert not (tmp_path / "cache" / "corpora").exists()


def test_a_second_run_in_the_same_folder_is_refused_and_writes_nothing(
    train: TrainCommand, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    output.mkdir()
    with locked(output, ""):
        assert f"another run is training in {output}" in train.refused(output)
    assert list(output.iterdir()) == []
    with locked(output, ""):
        pass
