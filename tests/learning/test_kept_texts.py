"""Kept answers: bounded, private, and readable whatever happened to some of their bytes."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import stat
import zlib
from pathlib import Path

import pytest
from learning_samples import append_many, some_text, write_and_be_killed

from redrafter_mlx.errors import BadInputError
from redrafter_mlx.learning import kept_texts
from redrafter_mlx.learning.folder import LearningFolder
from redrafter_mlx.learning.kept_texts import KeptText, TextStore

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "texts"


def test_what_is_kept_is_read_back_in_order(folder: Path) -> None:
    store = TextStore(folder)
    kept = [some_text(i) for i in range(5)]
    for text in kept:
        store.append(text)
    assert [*store.texts()] == kept
    assert [*TextStore(folder).texts()] == kept
    assert TextStore(folder).count() == len(kept)


def test_the_oldest_files_are_removed_first_and_the_limit_holds(folder: Path) -> None:
    limit = 20_000
    store = TextStore(folder, limit)
    for i in range(300):
        store.append(some_text(i))
        assert sum(path.stat().st_size for path in folder.iterdir()) <= limit
    left = [text.time for text in store.texts()]
    assert left == [float(i) for i in range(300 - len(left), 300)]
    assert len(left) > 50


def test_a_text_larger_than_a_file_is_left_out(folder: Path) -> None:
    store = TextStore(folder, 4_000)
    store.append(some_text(1, length=3_000))
    store.append(some_text(2))
    assert [text.time for text in store.texts()] == [2.0]


def test_only_the_owner_can_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path))
    os.umask(before := os.umask(0))
    os.umask(0)
    try:
        folder = LearningFolder.of("sha256:1")
        folder.create("tiny", "sha256:1")
        TextStore(folder.texts).append(some_text(1))
    finally:
        os.umask(before)
    for path in (folder.path.parent, folder.path, folder.texts, *folder.path.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("line", range(4))
def test_a_damaged_line_counts_as_none_and_the_others_stay(folder: Path, line: int) -> None:
    store = TextStore(folder)
    for i in range(4):
        store.append(some_text(i))
    (path,) = folder.iterdir()
    lines = path.read_bytes().splitlines(keepends=True)
    changed = bytearray(lines[line])
    changed[20] ^= 1
    path.write_bytes(b"".join([*lines[:line], bytes(changed), *lines[line + 1 :]]))
    assert [text.time for text in store.texts()] == [float(i) for i in range(4) if i != line]


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 1000, b"no json\n" * 9, b"\xff\xfe{}\n", b"{" * 99]
)
def test_a_file_of_other_bytes_counts_as_none(folder: Path, content: bytes) -> None:
    store = TextStore(folder)
    store.append(some_text(1))
    (folder / "00000000000000000000-1.jsonl").write_bytes(content)
    assert [text.time for text in store.texts()] == [1.0]


@pytest.mark.parametrize("answer", ["words", {"a": 1}, [1.5], [None], [[1], [2, 3]], [-1], [2**70]])
def test_a_line_without_token_ids_counts_as_none(folder: Path, answer: object) -> None:
    store = TextStore(folder)
    store.append(some_text(1))
    content = json.dumps({"prompt": [1], "answer": answer, "temperature": 0, "time": 0}).encode()
    line = b"%08x %b\n" % (zlib.crc32(content), content)
    (folder / "00000000000000000000-1.jsonl").write_bytes(line)
    assert [text.time for text in store.texts()] == [1.0]


def test_texts_of_another_vocabulary_are_left_out(folder: Path) -> None:
    store = TextStore(folder)
    for time, text in enumerate([((1,), (2, 8)), ((1,), (2, 9)), ((9,), (2, 8)), ((1,), ())]):
        store.append(KeptText(*text, time=float(time)))
    assert [text.time for text in store.texts(vocab_size=9)] == [0.0, 3.0]


def test_a_text_cut_anywhere_by_a_kill_is_not_read(folder: Path) -> None:
    store = TextStore(folder)
    store.append(some_text(1))
    store.append(some_text(2))
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first, len(whole) - 1, 7):
        path.write_bytes(whole[:cut])
        assert [text.time for text in TextStore(folder).texts()] == [1.0]


def test_a_killed_process_loses_nothing_that_it_has_kept(folder: Path) -> None:
    child = SPAWN.Process(target=write_and_be_killed, args=(folder, 7))
    child.start()
    child.join()
    assert child.exitcode == -9
    TextStore(folder).append(some_text(100))
    assert [text.time for text in TextStore(folder).texts()] == [*map(float, range(7)), 100.0]


def test_two_processes_keep_all_their_answers(folder: Path) -> None:
    children = [SPAWN.Process(target=append_many, args=(folder, 1000 * n, 40)) for n in (1, 2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0
    times = sorted(text.time for text in TextStore(folder).texts())
    assert times == [float(1000 * n + i) for n in (1, 2) for i in range(40)]


def test_a_full_disk_tears_no_other_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TextStore(folder)
    store.append(some_text(1))
    (path,) = folder.iterdir()
    opened = Path.open

    def full(self: Path, *_: object, **__: object) -> object:
        with opened(self, "ab", buffering=0) as file:
            file.write(b"0123abcd {torn")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        with pytest.raises(OSError, match="No space"):
            store.append(some_text(2))
    store.append(some_text(3))
    assert [text.time for text in TextStore(folder).texts()] == [1.0, 3.0]


def test_a_nearly_full_disk_is_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_texts, "free_disk", lambda _: 0)
    with pytest.raises(OSError, match="nearly full"):
        TextStore(folder).append(some_text(1))
    assert [*TextStore(folder).texts()] == []


def test_a_store_that_was_forgotten_meanwhile_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path))
    folder = LearningFolder.of("sha256:1")
    store = TextStore(folder.texts, prepare=lambda: folder.create("tiny", "sha256:1"))
    store.append(some_text(1))
    folder.forget()
    assert not folder.path.exists()
    store.append(some_text(2))
    assert [text.time for text in TextStore(folder.texts).texts()] == [2.0]
    assert folder.model == "tiny"


def test_nothing_is_forgotten_while_a_process_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path))
    folder = LearningFolder.of("sha256:1")
    folder.create("tiny", "sha256:1")
    with folder.locked(), pytest.raises(BadInputError, match="another process learns"):
        folder.forget()
    folder.forget()
    assert not folder.path.exists()


def test_another_users_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(BadInputError, match="belongs to another user"):
        LearningFolder.of("sha256:1").create("tiny", "sha256:1")
