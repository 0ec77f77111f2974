"""Learned drafters: one is in use, earlier ones stay, and a broken one is passed over."""

from __future__ import annotations

import os
from pathlib import Path

import mlx.core as mx
import pytest
from tiny import random_drafter

from redrafter_mlx.drafting.files.installed import find_drafters, own_shelf
from redrafter_mlx.drafting.recurrent import save_drafter
from redrafter_mlx.errors import BadInputError, DamagedFileError
from redrafter_mlx.learning.folder import LearningFolder
from redrafter_mlx.learning.versions import (
    LearnedVersion,
    LearningRun,
    add_version,
    bring_into_use,
    history,
    in_use,
    record_run,
    undo,
    versions,
)

MINE = "sha256:mine"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LearningFolder:
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path))
    folder = LearningFolder.of(MINE)
    folder.create("tiny", MINE)
    return folder


def write(path: Path) -> None:
    save_drafter(random_drafter(target_fingerprint=MINE), path, dtype=mx.float16)


def learned(folder: LearningFolder, start: LearnedVersion | None = None) -> LearnedVersion:
    version = add_version(folder, write, None if start is None else start.name, 1.0)
    bring_into_use(folder, version)
    return version


def found() -> list[Path]:
    folders, broken = find_drafters(MINE)
    assert not broken
    return folders


def test_the_version_in_use_is_found_and_undo_goes_back_one_at_a_time(
    folder: LearningFolder,
) -> None:
    assert found() == []
    first = learned(folder)
    second = learned(folder, first)
    assert found() == [second.folder]
    assert undo(folder) == first
    assert found() == [first.folder]
    third = learned(folder, first)
    assert third.name > second.name, "no version is overwritten"
    assert undo(folder) == first
    assert undo(folder) is None
    assert found() == []
    with pytest.raises(BadInputError, match="nothing to undo"):
        undo(folder)
    assert [version.name for version in versions(folder)] == ["0001", "0002", "0003"]


def test_a_version_that_is_not_in_use_changes_nothing(folder: LearningFolder) -> None:
    first = learned(folder)
    add_version(folder, write, first.name, 2.0)
    assert found() == [first.folder]


def test_a_drafter_that_was_trained_later_comes_first(folder: LearningFolder) -> None:
    version = learned(folder)
    own = own_shelf() / "mine"
    write(own)
    for path, time in ((folder.current, 100), (own / "model.safetensors", 200)):
        os.utime(path, (time, time))
    assert found() == [own, version.folder]
    os.utime(folder.current, (300, 300))
    assert found() == [version.folder, own]


def test_a_version_that_cannot_be_written_leaves_no_folder(folder: LearningFolder) -> None:
    first = learned(folder)

    def full(path: Path) -> None:
        write(path)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        add_version(folder, full, None, 1.0)
    assert [*folder.drafters.iterdir()] == [first.folder]
    assert found() == [first.folder]


def test_a_choice_of_nothing_is_named_and_another_drafter_taken(folder: LearningFolder) -> None:
    learned(folder)
    own = own_shelf() / "mine"
    write(own)
    for content in ("../../drafters/mine", "0099", "\0", ""):
        folder.current.write_text(content)
        folders, broken = find_drafters(MINE)
        assert folders == [own]
        assert len(broken) == 1
        with pytest.raises(DamagedFileError):
            in_use(folder)


def test_old_versions_are_removed_but_not_the_one_in_use_or_its_start(
    folder: LearningFolder,
) -> None:
    first = learned(folder)
    for _ in range(12):
        add_version(folder, write, None, 1.0)
    last = learned(folder, first)
    left = [version.name for version in versions(folder)]
    assert {first.name, last.name} < {*left}
    assert len(left) == 8


def test_the_history_is_read_back_without_its_damaged_lines(folder: LearningFolder) -> None:
    runs = [LearningRun(1.0, 300, 40, 60.0, (2.0, 2.3), (1.9, 1.9), "0001"),
            LearningRun(2.0, 310, 0, 0.0, (2.3, 2.2))]  # fmt: skip
    for run in runs:
        record_run(folder, run)
    with folder.history.open("a") as file:
        file.write('\n{"time": 3}\n{"torn')
    record_run(folder, runs[0])
    assert history(folder) == [*runs, runs[0]]


def test_forgetting_leaves_nothing(folder: LearningFolder) -> None:
    learned(folder)
    folder.forget()
    assert not folder.path.exists()
    assert found() == []
