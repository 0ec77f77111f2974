"""Earlier texts on disk: what is found again, and what a fault of the disk or a process does."""

from __future__ import annotations

import json
import logging
import stat
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from full_disk import files_of_at_most

from redrafter_mlx.decoding.cache.prefix_store import stored_files
from redrafter_mlx.decoding.cache.text_store import TextStore
from redrafter_mlx.drafting.untrained.continuation import EarlierState
from redrafter_mlx.drafting.untrained.earlier import EarlierTexts
from redrafter_mlx.errors import BadInputError

TEXTS = [[1, 2, 3, 4], [5], [(7 * i + 3) % 256 for i in range(600)]]
TRIALS = [(2.0, 4.0), (3.5, 5.0)]
KEPT = EarlierState(TEXTS, TRIALS)


def make(folder: Path, setup: str = "model", max_bytes: int = 10**9) -> TextStore:
    return TextStore(folder, max_bytes, setup, 258)


def keep(folder: Path, kept: EarlierState = KEPT, **made: object) -> list[Path]:
    store = make(folder, **made)  # type: ignore[arg-type]
    store.save(kept)
    store.close()
    return files(folder)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*/*") if path.is_file())


def test_after_a_restart_the_texts_are_those_that_were_written_last(tmp_path: Path) -> None:
    keep(tmp_path, EarlierState([[9]], TRIALS))
    (file,) = keep(tmp_path)
    assert make(tmp_path).load() == KEPT
    assert [one.path for one in stored_files(tmp_path)] == [file]
    assert make(tmp_path, "another model").load() is None


def test_only_the_owner_may_read_what_was_typed(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "cache"
    (file,) = keep(folder)
    for path, mode in ((folder, 0o700), (file.parent, 0o700), (file, 0o600)):
        assert stat.S_IMODE(path.stat().st_mode) == mode


def content(facts: object, tokens: list[int]) -> bytes:
    return json.dumps(facts).encode() + b"\n" + np.array(tokens, "<i4").tobytes()


SOUND = {"lengths": [2, 1], "trials": TRIALS}


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"x" * 100,
        content(SOUND, [1, 2, 3])[:-1],
        content(SOUND, [1, 2]),
        content(SOUND, [1, 2, 258]),
        content(SOUND, [1, 2, -1]),
        content({"lengths": [2, 1]}, [1, 2, 3]),
        content({**SOUND, "trials": [[2, 1]]}, [1, 2, 3]),
        content({**SOUND, "trials": [["a", 1]]}, [1, 2, 3]),
        content({**SOUND, "lengths": "ab"}, [1, 2, 3]),
        content([], [1, 2, 3]),
        None,
    ],
)
def test_a_damaged_file_counts_as_none_and_is_removed(
    tmp_path: Path, damaged: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one whose checksum is right; None stands for a flipped bit."""
    (file,) = keep(tmp_path)
    if damaged is None:
        flipped = bytearray(file.read_bytes())
        flipped[-7] ^= 4
        file.write_bytes(flipped)
    else:
        file.write_bytes(damaged)
        file = file.rename(file.with_name(f"texts-{zlib.crc32(damaged):08x}.bin"))
    assert make(tmp_path).load() is None
    assert files(tmp_path) == []
    assert str(file) in caplog.text
    keep(tmp_path)
    assert make(tmp_path).load() == KEPT


def test_of_many_that_are_saved_at_once_the_last_is_written(tmp_path: Path) -> None:
    store = make(tmp_path)
    for n in range(200):
        store.save(EarlierState([[n]], TRIALS))
    store.close()
    assert make(tmp_path).load() == EarlierState([[199]], TRIALS)
    assert len(files(tmp_path)) == 1


def test_texts_larger_than_the_limit_are_not_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep(tmp_path, max_bytes=100)
    assert files(tmp_path) == []
    assert "limit" in caplog.text


def test_no_more_is_taken_over_than_is_kept(tmp_path: Path) -> None:
    many = EarlierState([[n % 258] * 100 for n in range(300)], TRIALS)
    keep(tmp_path, many)
    kept = make(tmp_path).load()
    assert kept is not None
    store = EarlierTexts(1000)
    store.restore(kept)
    assert [text.tokens.tolist() for text in store.texts] == [*many.texts][-10:]


def test_a_full_disk_is_said_and_keeps_what_was_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = keep(tmp_path)
    with files_of_at_most(20_000):
        keep(tmp_path, EarlierState([[7] * 50_000], TRIALS))
    assert files(tmp_path) == before
    assert [one.levelno for one in caplog.records] == [logging.WARNING]
    assert make(tmp_path).load() == KEPT


def test_a_process_that_is_killed_while_it_writes_leaves_whole_texts(tmp_path: Path) -> None:
    """Those of its last write, or of an earlier one; the next process removes the rest."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from redrafter_mlx.decoding.cache.text_store import TextStore\n"
        "from redrafter_mlx.drafting.untrained.continuation import EarlierState\n"
        "store, n = TextStore(Path(sys.argv[1]), 10**9, 'model', 258), 0\n"
        "while True:\n"
        "    store.save(EarlierState([[n % 258] * 200_000], [(1.0, 2.0)]))\n"
        "    n += 1\n"
        "    if n == 3: print('writing', flush=True)\n"
    )
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=-1) as process:
            assert process.stdout is not None
            assert process.stdout.readline()
            while not list(tmp_path.glob("*/texts-*")):  # its first file may be only begun
                pass
            process.kill()
        kept = make(tmp_path).load()
        assert kept is not None
        (text,) = kept.texts
        assert (len(text), len({*text})) == (200_000, 1)
        assert not [path for path in files(tmp_path) if path.name.startswith(".")]


def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(BadInputError, match="belongs to another user"):
        make(tmp_path)
