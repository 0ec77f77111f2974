"""A remembered checksum is used only for a file that has not changed since."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import pytest

from redrafter_mlx.weights.fetching import checksum
from redrafter_mlx.weights.fetching.checksum import is_intact, sha256_of


@pytest.fixture
def big(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is treated as large enough for its checksum to be remembered."""
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(checksum, "WORTH_REMEMBERING", 1)
    path = tmp_path / "model"
    path.write_bytes(b"abc" * 1000)
    return path


def _reads(path: Path) -> int:
    calls: list[int] = []
    sha256_of(path, lambda *_: calls.append(1))
    return len(calls)


def test_checksum_is_sha256_of_the_content(big: Path) -> None:
    assert sha256_of(big) == hashlib.sha256(b"abc" * 1000).hexdigest()


def test_unchanged_file_is_read_once(big: Path) -> None:
    assert _reads(big) > 0
    assert _reads(big) == 0


def test_truncated_file_is_noticed_after_its_sum_was_remembered(big: Path) -> None:
    whole = sha256_of(big)
    state = big.stat()
    os.truncate(big, 2999)
    os.utime(big, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert not is_intact(big, whole, 3000)
    assert sha256_of(big) != whole


def test_changed_file_of_the_same_size_is_noticed(big: Path) -> None:
    whole = sha256_of(big)
    big.write_bytes(b"abd" * 1000)
    os.utime(big, ns=(0, 12345))
    assert not is_intact(big, whole, 3000)


def test_missing_file_is_not_intact(tmp_path: Path) -> None:
    assert not is_intact(tmp_path / "nothing", "0" * 64, 1)


def test_cache_that_cannot_be_written_is_no_error(
    big: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path / "file" / "cache"))
    assert sha256_of(big) == hashlib.sha256(b"abc" * 1000).hexdigest()


def test_damaged_note_is_ignored(big: Path, tmp_path: Path) -> None:
    sha256_of(big)
    for note in (tmp_path / "cache").rglob("*.json"):
        note.write_text("{")
    assert sha256_of(big) == hashlib.sha256(b"abc" * 1000).hexdigest()


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has no such names")
def test_a_path_that_is_not_utf_8_has_a_checksum(big: Path, tmp_path: Path) -> None:
    path = big.rename(tmp_path / os.fsdecode(b"m\xfc"))
    assert _reads(path) > 0
    assert _reads(path) == 0
