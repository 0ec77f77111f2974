"""`learn`: what is kept can be seen, undone and forgotten; mistakes are one line."""

from __future__ import annotations

import os
import plistlib
import subprocess
from pathlib import Path

import pytest
from command_line import CommandLine
from learning_samples import append_many, chained_target, keep_chains

from redrafter_mlx.cli import main
from redrafter_mlx.cli.learn import at_night
from redrafter_mlx.cli.learn.show import summary
from redrafter_mlx.learning.folder import LearningFolder
from redrafter_mlx.learning.versions import LearningRun, add_version, bring_into_use, record_run
from redrafter_mlx.loading import target


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LearningFolder:
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path / "cache"))
    folder = LearningFolder.of("sha256:1")
    folder.create("tiny", "sha256:1")
    append_many(folder.texts, 1, 5)
    return folder


def learned(folder: LearningFolder, newest: float) -> None:
    def write(path: Path) -> None:
        (path / "config.json").write_text("{}")

    version = add_version(folder, write, None, newest)
    bring_into_use(folder, version)
    record_run(folder, LearningRun(1e9, 5, 70, 60.0, (2.0, 2.5), (1.5, 1.49), version.name))


def test_status_says_how_much_is_kept_and_what_was_learned(
    folder: LearningFolder, cli: CommandLine
) -> None:
    out = cli.out("learn", "--status")
    assert "5 (" in out
    assert "5 of them new" in out
    assert "none yet" in out
    assert str(folder.path) in out
    learned(folder, newest=3.0)
    out = cli.out("learn", "tiny", "--status")
    assert "2 of them new" in out
    assert "2.00 -> 2.50 tokens/step (+25.0%)" in out
    assert "version 0001" in out


def test_undo_goes_back_and_says_to_what(folder: LearningFolder, cli: CommandLine) -> None:
    learned(folder, newest=3.0)
    assert "began with" in cli.out("learn", "--undo")
    assert not folder.current.exists()
    assert "nothing to undo" in cli.error("learn", "--undo")


def test_forget_leaves_nothing(folder: LearningFolder, cli: CommandLine) -> None:
    learned(folder, newest=3.0)
    assert "removed" in cli.out("learn", "--forget")
    assert [*folder.path.parent.rglob("*")] == []
    for option in ("--forget", "--status"):
        assert "nothing is kept" in cli.out("learn", option)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--undo", "--forget"], "--undo and --forget"),
        (["--minutes", "0"], "minutes is 0"),
        (["--plot"], "nothing was learned for tiny yet"),
        (["/no/such/model", "--status"], "/no/such/model"),
        (["/no/such/model", "--forget"], "/no/such/model"),
    ],
)
def test_a_mistake_is_one_line_and_changes_nothing(
    folder: LearningFolder, cli: CommandLine, arguments: list[str], named: str
) -> None:
    before = sorted(folder.path.rglob("*"))
    assert named in cli.error("learn", *arguments)
    assert sorted(folder.path.rglob("*")) == before


def test_a_run_says_what_it_brought_and_a_second_one_that_nothing_is_new(
    folder: LearningFolder, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = chained_target()
    folder.forget()
    keep_chains(loaded)
    monkeypatch.setattr(target, "load_target", lambda *_, **__: loaded)
    out = cli.out("learn", "tiny", "--minutes", "0.1")
    assert "tokens/step" in out
    assert "version 0001 is used from the next start on" in out
    assert "no answer was kept since" in cli.out("learn", "tiny")
    assert main.run(["learn", "tiny", "--undo"]) == 0


def test_a_plot_of_the_runs_is_drawn(folder: LearningFolder, cli: CommandLine) -> None:
    pytest.importorskip("matplotlib")
    learned(folder, newest=3.0)
    record_run(folder, LearningRun(2e9, 9, 70, 60.0, (2.5, 2.4)))
    path = Path(cli.out("learn", "tiny", "--plot").strip())
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_entry_for_cron_is_one_line_that_a_shell_can_read(
    folder: LearningFolder, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    captured = cli.run("learn", "a model", "--at-night", "--minutes", "20")
    (line,) = captured.out.splitlines()
    assert "crontab -e" in captured.err
    *when, command = line.split(" ", 5)
    assert when == ["0", "3", "*", "*", "*"]
    assert "learn 'a model' --minutes 20" in command
    assert f"REDRAFTER_CACHE={folder.path.parent.parent}" in command
    subprocess.run(["sh", "-n", "-c", command], check=True)


@pytest.mark.parametrize(
    ("power", "idle", "learns"),
    [("AC Power", 901, True), ("AC Power", 12, False), ("Battery Power", 901, False)],
)
def test_a_mac_learns_while_it_is_idle_and_on_mains_power(
    folder: LearningFolder, tmp_path: Path, power: str, idle: int, learns: bool
) -> None:
    """With programs of a Mac that say what the case asks for."""
    del folder
    nanoseconds = f'"HIDIdleTime" = {idle}000000000'
    for name, said in (("pmset", f"Now drawing from '{power}'"), ("ioreg", nanoseconds),
                       ("redrafter-mlx", "learned")):  # fmt: skip
        (tmp_path / name).write_text(f"#!/bin/sh\ncat <<'E'\n{said}\nE\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", path)
        text, how = at_night.entry("tiny", 10.0, "darwin")
        agent = plistlib.loads(text.encode())
        done = subprocess.run(agent["ProgramArguments"], capture_output=True, text=True)
    assert "launchctl" in how
    assert ("learned" in done.stdout) is learns
    assert agent["StartCalendarInterval"]["Hour"] == 3


def test_doctor_and_a_chat_say_how_far_along_it_is(
    folder: LearningFolder, cli: CommandLine
) -> None:
    assert summary(folder) == "5 answers kept, none learned from yet"
    learned(folder, newest=3.0)
    learned(folder, newest=4.0)
    assert "2.00 -> 2.50 tokens/step (+25.0%)" in summary(folder)
    lines = cli.out("doctor").splitlines()
    assert ["tiny", summary(folder)] in [line.split(maxsplit=1) for line in lines]
