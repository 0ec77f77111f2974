"""Answers on disk: append-only files of one line an answer, the oldest removed first.

Each process appends to a file of its own, so that two never write the same one. A line is the
CRC-32 of its JSON, a space and the JSON. A line that was torn by a kill or changed on the disk is
left out; the others count.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from redrafter_mlx.learning.folder import private_folder
from redrafter_mlx.runtime.files.atomic_write import flush_to_disk
from redrafter_mlx.runtime.files.paths import free_disk

MAX_BYTES = 200_000_000
"""Limit of the kept answers of a model."""

_FILE_BYTES = 4_000_000
"""Size from which a file is followed by the next one; whole files are removed."""

_ENDING = ".jsonl"


@dataclass(frozen=True)
class KeptText:
    """A prompt and its answer, as token ids.

    temperature: at which the answer's tokens were chosen; 0 takes the likeliest
    time:        when it was kept, in seconds since 1970
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    temperature: float = 0.0
    time: float = 0.0


class TextStore:
    """The kept answers in one folder. One thread of a process may append to it.

    max_bytes: limit of all files together
    prepare:   called before a file is begun, to create the folders above
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int = MAX_BYTES,
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        self.folder, self._max_bytes, self._prepare = folder, max_bytes, prepare
        self._file: Path | None = None  # to which this process appends

    def append(self, text: KeptText) -> None:
        """Keep an answer; raises OSError if it cannot be written, and nothing else is changed.

        A store that was removed meanwhile begins anew.
        """
        line = _to_line(text)
        if len(line) > self._file_bytes:
            return
        if self._file is None or not self._has_room(self._file, len(line)):
            self._begin()
        assert self._file is not None
        if not free_disk(self.folder):
            raise OSError(f"the disk of {self.folder} is nearly full")
        try:
            with self._file.open("ab", buffering=0) as file:
                if file.write(line) != len(line):
                    raise OSError(f"{self._file} cannot be written: is the disk full?")
        except OSError:
            self._file = None  # which may end in a torn line
            raise

    def texts(self, vocab_size: int | None = None) -> Iterator[KeptText]:
        """Yield the answers that can be read, the oldest first.

        vocab_size: leaves out those with tokens of another vocabulary
        """
        for path in self._files():
            with contextlib.suppress(OSError):  # removed meanwhile
                for text in filter(None, map(_from_line, path.read_bytes().split(b"\n"))):
                    if vocab_size is None or max(text.prompt + text.answer, default=0) < vocab_size:
                        yield text

    def count(self) -> int:
        """Return the number of kept answers; damaged ones count until they are read."""
        found = 0
        for path in self._files():
            with contextlib.suppress(OSError):
                found += path.read_bytes().count(b"\n")
        return found

    @property
    def nbytes(self) -> int:
        return sum(_size(path) for path in self._files())

    @property
    def _file_bytes(self) -> int:
        return min(_FILE_BYTES, self._max_bytes // 4)

    def _has_room(self, file: Path, nbytes: int) -> bool:
        """Whether a line fits into a file, which is still there."""
        return file.exists() and _size(file) + nbytes <= self._file_bytes

    def _begin(self) -> None:
        """Begin a file, after the oldest ones were removed to make room for a full one."""
        self._prepare()
        private_folder(self.folder)
        if self._file is not None and self._file.exists():
            flush_to_disk(self._file)
        files = self._files()
        total = sum(map(_size, files)) + self._file_bytes
        for path in files:
            if total > self._max_bytes:
                total -= _size(path)
                path.unlink(missing_ok=True)
        file = self.folder / f"{time.time_ns():020d}-{os.getpid()}{_ENDING}"
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        self._file = file

    def _files(self) -> list[Path]:
        """Return all files, the oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.glob(f"*{_ENDING}") if path.is_file())


def _to_line(text: KeptText) -> bytes:
    content = json.dumps(asdict(text), separators=(",", ":")).encode()
    return b"%08x %b\n" % (zlib.crc32(content), content)


def _from_line(line: bytes) -> KeptText | None:
    """Return the text of a line, None if it is damaged."""
    checksum, _, content = line.partition(b" ")
    try:
        if int(checksum, 16) != zlib.crc32(content):
            return None
        held = json.loads(content)
        tokens = tuple(array("I", held["prompt"])), tuple(array("I", held["answer"]))
        return KeptText(*tokens, float(held["temperature"]), float(held["time"]))
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0
