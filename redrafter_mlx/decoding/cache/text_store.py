"""Earlier texts on disk, which drafts are copied from, so that a restart does not forget them.

They are one file of a setup's folder, which is written anew after answers. Its name ends with the
checksum of its bytes: a JSON line, and the tokens of all texts as int32.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from redrafter_mlx.decoding.cache.prefix_store import make_room, private_folder
from redrafter_mlx.drafting.untrained.continuation import EarlierState
from redrafter_mlx.runtime.files.atomic_write import name_in_errors, remove_abandoned

LOG = logging.getLogger("redrafter_mlx.engine")

_NAME = re.compile(r"texts-([0-9a-f]{8})\.bin")


class TextStore:
    """The texts that one drafter on the host keeps for one target; its owner alone can read them.

    Several processes may use it. Each writes its own texts, and the last one's are loaded.
    """

    def __init__(self, folder: Path, max_bytes: int, setup: str, vocab_size: int) -> None:
        """`max_bytes`: of all files in the folder. Raises BadInputError if it cannot be used."""
        self._root, self._max_bytes, self._vocab_size = folder, max_bytes, vocab_size
        self._folder = private_folder(folder, setup)
        remove_abandoned(self._folder.glob(".*.bin"))
        self.writer = ThreadPoolExecutor(1, "texts")
        self._next: EarlierState | None = None
        self._lock = threading.Lock()
        self._fails = False

    def load(self) -> EarlierState | None:
        """Return the texts that were written last; None if there are none.

        A damaged file counts as none, and is removed.
        """
        for path in sorted(self._files(), key=_written, reverse=True):
            try:
                return _read(path, self._vocab_size)
            except (OSError, ValueError, KeyError, TypeError) as error:
                LOG.warning("%s is not used, and removed: %s", path, error)
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
        return None

    def save(self, kept: EarlierState) -> None:
        """Write texts in another thread; those that wait to be written give way to them.

        Where writing fails, the log says so once.
        """
        with self._lock:
            waits, self._next = self._next is not None, kept
        if not waits:
            self.writer.submit(self._write)

    def close(self) -> None:
        """Wait until all is written."""
        self.writer.shutdown()

    def _write(self) -> None:
        with self._lock:
            kept, self._next = self._next, None
        assert kept is not None, "each call writes what one `save` left"
        content = _content(kept)
        name = f"texts-{zlib.crc32(content):08x}.bin"
        partial = self._folder / f".{os.getpid()}-{threading.get_ident()}.{name}"
        older = self._files()
        try:
            make_room(self._root, len(content), self._max_bytes)
            with name_in_errors(partial):
                partial.touch(mode=0o600)
                partial.write_bytes(content)
                partial.rename(self._folder / name)
            for path in older:
                if path.name != name:
                    path.unlink(missing_ok=True)
        except OSError as error:
            partial.unlink(missing_ok=True)
            if not self._fails:
                LOG.warning("earlier texts are not kept on disk: %s", error)
            self._fails = True

    def _files(self) -> list[Path]:
        return [path for path in self._folder.glob("texts-*.bin") if _NAME.fullmatch(path.name)]


def _content(kept: EarlierState) -> bytes:
    facts = {"lengths": [len(text) for text in kept.texts], "trials": kept.trials}
    tokens = [np.asarray(text, "<i4").tobytes() for text in kept.texts]
    return json.dumps(facts).encode() + b"\n" + b"".join(tokens)


def _read(path: Path, vocab_size: int) -> EarlierState:
    """Read a file; raises ValueError, KeyError or TypeError if it is damaged."""
    content, name = path.read_bytes(), _NAME.fullmatch(path.name)
    if name is None or f"{zlib.crc32(content):08x}" != name[1]:
        raise ValueError("its bytes have changed")
    head, _, rest = content.partition(b"\n")
    facts, tokens = json.loads(head), np.frombuffer(rest, "<i4")
    ends = np.cumsum(facts["lengths"], dtype=np.int64)
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise ValueError("it has tokens that the model has not")
    if len(tokens) != (ends[-1] if len(ends) else 0):
        raise ValueError("it lacks tokens")
    trials = [(float(hits), float(tried)) for hits, tried in facts["trials"]]
    if not all(0 < hits <= tried < math.inf for hits, tried in trials):
        raise ValueError("its acceptance record is none")
    return EarlierState([text.tolist() for text in np.split(tokens, ends[:-1])], trials)


def _written(path: Path) -> float:
    with contextlib.suppress(FileNotFoundError):  # another process removes some
        return path.stat().st_mtime
    return 0.0
