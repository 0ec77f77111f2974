"""Prefixes on disk: what is found again, and what a fault of the disk or another process does."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from full_disk import files_of_at_most

from redrafter_mlx.decoding.cache.prefix_store import PrefixStore, StoredPrefix
from redrafter_mlx.errors import BadInputError

TEXT = [(7 * i + 3) % 256 for i in range(600)]


def stored(tokens: list[int], seed: int = 0, size: int = 50) -> StoredPrefix:
    mx.random.seed(seed)
    values = mx.random.normal((2, size))
    half = values.astype(mx.bfloat16)
    layers = ((values, half, None, None), (values[:1], ((half,),), None))
    mx.eval(values, half, layers[1][0])
    return StoredPrefix(np.array(tokens, np.int64), layers, len(tokens) - 1, len(tokens) - 3)


def make(folder: Path, setup: str = "model", max_bytes: int = 10**9) -> PrefixStore:
    return PrefixStore(folder, max_bytes, setup)


def keep(folder: Path, *prefixes: StoredPrefix, setup: str = "model") -> list[Path]:
    store = make(folder, setup)
    for prefix in prefixes:
        store.save(prefix)
    store.close()
    return files(folder)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*"))


def test_after_a_restart_the_longest_prefix_is_found_bit_for_bit(tmp_path: Path) -> None:
    other = stored([9, *TEXT[:400]], seed=1)
    kept = stored(TEXT[:500])
    keep(tmp_path, other, kept)
    store = make(tmp_path)
    path, shared = store.longest([*TEXT[:450], 1, 2])
    assert shared == 450
    assert path is not None
    found = store.load(path)
    assert found is not None
    assert found.tokens.tolist() == TEXT[:500]
    assert (found.remembered, found.prompt) == (499, 497)
    (keys, half, *none), (first, ((again,),), nothing) = found.arrays  # type: ignore[misc]
    (want, want_half, *_), (want_first, *_) = kept.arrays  # type: ignore[misc]
    assert none == [None, None]
    assert nothing is None
    for one, other_one in (
        (keys, want),
        (half, want_half),
        (first, want_first),
        (again, want_half),
    ):
        assert one.dtype == other_one.dtype  # type: ignore[union-attr]
        assert mx.array_equal(one, other_one).item()  # type: ignore[arg-type]
    assert store.longest([1, 2, 3])[0] is None


def test_no_file_serves_another_setup(tmp_path: Path) -> None:
    keep(tmp_path, stored(TEXT))
    assert make(tmp_path, "another model").longest(TEXT) == (None, 0)


def test_only_the_owner_may_read_what_was_typed(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "cache"
    (file,) = keep(folder, stored(TEXT))
    for path, mode in ((folder, 0o700), (file.parent, 0o700), (file, 0o600)):
        assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_text_is_written_again_once_it_is_clearly_longer_and_then_alone(tmp_path: Path) -> None:
    (first,) = keep(tmp_path, stored(TEXT[:300]))
    assert keep(tmp_path, stored(TEXT[:400])) == [first]
    (second,) = keep(tmp_path, stored(TEXT))
    assert second != first


@pytest.mark.parametrize("damage", ["flipped", "cut", "emptied", "replaced", "no header"])
def test_a_damaged_file_counts_as_none_and_is_removed(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    (file,) = keep(tmp_path, stored(TEXT))
    content = bytearray(file.read_bytes())
    if damage == "flipped":
        content[-7] ^= 4
    made = {"cut": content[:-9], "emptied": b"", "replaced": b"x" * 100, "no header": content[40:]}
    file.write_bytes(made.get(damage, content))
    store = make(tmp_path)
    path, _ = store.longest(TEXT)
    assert path is None or store.load(path) is None
    assert store.longest(TEXT) == (None, 0)
    assert files(tmp_path) == []
    assert str(file) in caplog.text


def test_the_files_used_least_recently_give_way_of_all_setups(tmp_path: Path) -> None:
    one, two, three = (stored([n, *TEXT], seed=n, size=10_000) for n in range(3))
    (first,) = keep(tmp_path, one)
    _, second = sorted(keep(tmp_path, two, setup="another"), key=lambda path: path != first)
    for n, path in enumerate((second, first)):
        os.utime(path, ns=(n, n))
    limit = 2 * first.stat().st_size + 1000
    store = make(tmp_path, max_bytes=limit)
    store.save(three)
    store.close()
    assert first in files(tmp_path)
    assert second not in files(tmp_path)
    assert sum(path.stat().st_size for path in files(tmp_path)) <= limit


def test_a_text_larger_than_the_limit_removes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = keep(tmp_path, stored(TEXT))
    store = make(tmp_path, max_bytes=before[0].stat().st_size + 10)
    store.save(stored([5, *TEXT], size=100_000))
    store.close()
    assert files(tmp_path) == before
    assert "limit" in caplog.text


def test_a_file_that_another_process_removed_is_no_error(tmp_path: Path) -> None:
    (file,) = keep(tmp_path, stored(TEXT))
    store = make(tmp_path)
    path, _ = store.longest(TEXT)
    file.unlink()
    assert path is not None
    assert store.load(path) is None
    assert store.longest(TEXT) == (None, 0)


def test_what_another_process_wrote_meanwhile_is_found(tmp_path: Path) -> None:
    store = make(tmp_path)
    assert store.longest(TEXT) == (None, 0)
    keep(tmp_path, stored(TEXT))
    assert store.longest(TEXT)[1] == len(TEXT)


def test_a_full_disk_is_said_once_and_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with files_of_at_most(20_000):
        store = make(tmp_path)
        for n in range(2):
            store.save(stored([n, *TEXT], size=50_000))
        store.close()
    assert files(tmp_path) == []
    assert [one.levelno for one in caplog.records] == [logging.WARNING]


def test_a_process_that_is_killed_while_it_writes_leaves_no_file_that_is_used(
    tmp_path: Path,
) -> None:
    code = (
        "import sys, numpy as np, mlx.core as mx\n"
        "from pathlib import Path\n"
        "from redrafter_mlx.decoding.cache.prefix_store import PrefixStore, StoredPrefix\n"
        "a = mx.zeros((200, 1000, 1000)); mx.eval(a)\n"
        "store = PrefixStore(Path(sys.argv[1]), 10**12, 'model')\n"
        "store.save(StoredPrefix(np.arange(600), ((a,),), 600, 600))\n"
        "print('writing', flush=True); store.close()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline()
    while not files(tmp_path) or files(tmp_path)[0].stat().st_size < 1000:
        time.sleep(0.001)
    process.kill()
    process.communicate()
    assert make(tmp_path).longest([*range(600)]) == (None, 0)
    assert files(tmp_path) == []


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(BadInputError, match=str(tmp_path / "cache")):
        make(tmp_path / "cache")


def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(BadInputError, match="belongs to another user"):
        make(tmp_path)


def test_a_file_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(BadInputError, match="cache cannot hold prompts"):
        make(tmp_path / "cache")
