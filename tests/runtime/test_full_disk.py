"""A full disk or an unusable cache is named in the error, and existing files stay unchanged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from bench_samples import SETTINGS, answer
from full_disk import files_of_at_most
from tiny import random_drafter

from redrafter_mlx.bench.measure.answers import AnswersFile
from redrafter_mlx.drafting.recurrent import save_drafter
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.files import atomic_write as writes
from redrafter_mlx.runtime.files.atomic_write import atomic_write, write_private_text
from redrafter_mlx.runtime.files.paths import cache_dir


def _text(path: Path) -> None:
    write_private_text(path, "x" * 10_000)


def _arrays(path: Path) -> None:
    with atomic_write(path) as partial:
        mx.save_safetensors(str(partial), {"a": mx.zeros(10_000)})


def _drafter(path: Path) -> None:
    save_drafter(random_drafter(), path.parent)


@pytest.mark.parametrize("write", [_text, _arrays, _drafter])
def test_a_full_disk_is_named_by_the_file_and_leaves_what_was_there(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("what was there")
    with files_of_at_most(100), pytest.raises(OSError, match=r"large|write") as caught:
        write(path)
    assert str(caught.value.filename) in (str(path), str(tmp_path))
    assert path.read_text() == "what was there"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_mlx_breaks_off_asks_whether_the_disk_is_full(tmp_path: Path) -> None:
    with files_of_at_most(100), pytest.raises(OSError, match="disk full"):
        _arrays(tmp_path / "a.safetensors")


def test_macs_flush_a_file_to_the_disk_itself_if_its_file_system_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def fcntl(_: int, command: int) -> None:
        asked.append(command)
        raise OSError(25, "Inappropriate ioctl for device")

    monkeypatch.setattr(writes, "sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setattr(writes, "fcntl", SimpleNamespace(F_FULLFSYNC=51, fcntl=fcntl))
    write_private_text(tmp_path / "a", "text")
    assert (tmp_path / "a").read_text() == "text"
    assert asked == [51]


def test_answers_that_find_no_room_name_their_file(tmp_path: Path) -> None:
    answers = AnswersFile(tmp_path / "answers.jsonl")
    with files_of_at_most(100), pytest.raises(OSError, match="large") as caught:
        answers.append([answer()], SETTINGS)
    assert caught.value.filename == str(tmp_path / "answers.jsonl")


def test_a_cache_without_a_home_folder_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDRAFTER_CACHE", "~nobody-of-that-name/cache")
    with pytest.raises(BadInputError, match=r"~nobody-of-that-name.*REDRAFTER_CACHE"):
        cache_dir()
