"""`learn`: what is kept can be seen, undone and forgotten; mistakes are one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from learning_samples import append_many

from redrafter_mlx.cli import main
from redrafter_mlx.learning.folder import LearningFolder
from redrafter_mlx.learning.versions import LearningRun, add_version, bring_into_use, record_run


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
    folder: LearningFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["learn", "--status"]) == 0
    out = capsys.readouterr().out
    assert "5 (" in out
    assert "5 of them new" in out
    assert "none yet" in out
    assert str(folder.path) in out
    learned(folder, newest=3.0)
    assert main.run(["learn", "tiny", "--status"]) == 0
    out = capsys.readouterr().out
    assert "2 of them new" in out
    assert "2.00 -> 2.50 tokens/step (+25.0%)" in out
    assert "version 0001" in out


def test_undo_goes_back_and_says_to_what(
    folder: LearningFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    learned(folder, newest=3.0)
    assert main.run(["learn", "--undo"]) == 0
    assert "began with" in capsys.readouterr().out
    assert not folder.current.exists()
    assert main.run(["learn", "--undo"]) == 1
    assert "nothing to undo" in capsys.readouterr().err


def test_forget_leaves_nothing(folder: LearningFolder, capsys: pytest.CaptureFixture[str]) -> None:
    learned(folder, newest=3.0)
    assert main.run(["learn", "--forget"]) == 0
    assert "removed" in capsys.readouterr().out
    assert [*folder.path.parent.rglob("*")] == []
    for option in ("--forget", "--status"):
        assert main.run(["learn", option]) == 0
        assert "nothing is kept" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--undo", "--forget"], "--undo"),
        (["/no/such/model", "--status"], "/no/such/model"),
        (["/no/such/model", "--forget"], "/no/such/model"),
    ],
)
def test_a_mistake_is_one_line_and_changes_nothing(
    folder: LearningFolder, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    before = sorted(folder.path.rglob("*"))
    assert main.run(["learn", *arguments]) == 1
    err = capsys.readouterr().err
    assert named in err
    assert err.count("\n") == 1
    assert sorted(folder.path.rglob("*")) == before
