"""Prefixes on disk, so that a prompt is not read again after a restart.

Each is one file of a folder, which several processes may use at once. Its name ends with the
checksum of its bytes. A file that does not have it counts as none, and is removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import mlx.core as mx
import numpy as np

from redrafter_mlx.decoding.cache.prefix_cache import Tokens, common_prefix
from redrafter_mlx.decoding.cache.sequence_cache import Arrays
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.files.atomic_write import name_in_errors, remove_abandoned

LOG = logging.getLogger("redrafter_mlx.engine")

_NAME = re.compile(r"[0-9a-f]{32}-([0-9a-f]{8})\.safetensors")
_CHUNK = 1 << 24
_MIN_NEW = 256
"""Minimum number of tokens by which a text is longer than what is kept of it, or else it is not
written: a conversation would be written whole after each turn."""


@dataclass(frozen=True)
class StoredPrefix:
    """A text that was read, and its cache.

    remembered: number of positions that the drafter's memory holds
    prompt:     number of the text's first tokens that were its prompt
    """

    tokens: Tokens
    arrays: Arrays
    remembered: int
    prompt: int


@dataclass(frozen=True)
class StoredFile:
    """A file of a store: its size, and when it was last used, in seconds since the epoch."""

    path: Path
    nbytes: int
    used: float


def stored_files(folder: Path) -> list[StoredFile]:
    """Return the files of all setups in a folder, earlier texts included, the last used first."""
    found = []
    for path in [*folder.glob("*/*.safetensors"), *folder.glob("*/texts-*.bin")]:
        with contextlib.suppress(FileNotFoundError):  # another process removes some
            stat = path.stat()
            found.append(StoredFile(path, stat.st_size, stat.st_mtime))
    return sorted(found, key=lambda file: file.used, reverse=True)


def private_folder(root: Path, setup: str) -> Path:
    """Return the folder of a setup below `root`, made for its owner alone.

    Raises BadInputError if it cannot be used.
    """
    folder = root / hashlib.sha256(setup.encode()).hexdigest()[:32]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = root.stat().st_uid
        with contextlib.suppress(PermissionError):
            root.chmod(0o700)
    except OSError as error:
        raise BadInputError(f"{root} cannot hold prompts: {error.strerror}") from None
    if owner != os.getuid():
        raise BadInputError(
            f"{root} belongs to another user, who could read what you type; name another folder"
        )
    return folder


def make_room(root: Path, nbytes: int, max_bytes: int) -> None:
    """Remove the files that were used least recently, of all setups, until there is room.

    Raises OSError if there never is.
    """
    if nbytes > max_bytes:
        raise OSError(f"it takes {nbytes} bytes, more than the limit of {max_bytes}")
    files = stored_files(root)
    total = nbytes + sum(file.nbytes for file in files)
    for file in reversed(files):
        if total > max_bytes:
            file.path.unlink(missing_ok=True)
            total -= file.nbytes


class PrefixStore:
    """The prefixes of one setup: a model with its drafter, dtype, and versions.

    The folder, those below it and their files are the owner's alone: they hold what was typed.
    """

    def __init__(self, folder: Path, max_bytes: int, setup: str) -> None:
        """`max_bytes`: of all setups in the folder. Raises BadInputError if it cannot be used."""
        self._root, self._max_bytes = folder, max_bytes
        self._folder = private_folder(folder, setup)
        remove_abandoned(self._folder.glob(".*.safetensors"))
        self._known: dict[Path, Tokens] = {}
        self._writer = ThreadPoolExecutor(1, "prefixes")
        self._fails = False

    def longest(self, prompt: Sequence[int]) -> tuple[Path | None, int]:
        """Return the file that holds most of a prompt, and how many of its first tokens."""
        self._look()
        wanted = np.array(prompt, np.int64)
        best, longest = None, 0
        for path, tokens in self._known.items():
            if (shared := common_prefix(tokens, wanted)) > longest:
                best, longest = path, shared
        return best, longest

    def load(self, path: Path) -> StoredPrefix | None:
        """Read a file; None if it is gone or damaged."""
        try:
            if (name := _NAME.fullmatch(path.name)) is None or _checksum(path) != name[1]:
                raise ValueError("its bytes have changed")
            arrays, facts = _read(path)
            os.utime(path)
            tokens = np.array(arrays.pop("tokens"), np.int64)
            form = _filled(json.loads(facts["form"]), arrays)
            return StoredPrefix(tokens, form, int(facts["remembered"]), int(facts["prompt"]))
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            self._forget(path, error)
            return None

    def save(self, prefix: StoredPrefix) -> None:
        """Write a text that is longer than what is kept of it, in another thread.

        Its arrays must have been computed. Where writing fails, the log says so once.
        """
        _, kept = self.longest(prefix.tokens.tolist())
        if len(prefix.tokens) - kept >= _MIN_NEW:
            self._writer.submit(self._write, prefix)

    def close(self) -> None:
        """Wait until all is written."""
        self._writer.shutdown()

    def _write(self, prefix: StoredPrefix) -> None:
        tokens = prefix.tokens.astype(np.int32)
        arrays = dict[str, mx.array]()
        facts = {
            "form": json.dumps(_form(prefix.arrays, arrays)),
            "remembered": str(prefix.remembered),
            "prompt": str(prefix.prompt),
        }
        name = f"{hashlib.sha256(tokens.tobytes()).hexdigest()[:32]}"
        partial = self._folder / f".{os.getpid()}-{threading.get_ident()}.{name}.safetensors"
        try:
            make_room(self._root, sum(a.nbytes for a in arrays.values()), self._max_bytes)
            with name_in_errors(partial):
                partial.touch(mode=0o600)
                mx.save_safetensors(str(partial), {**arrays, "tokens": mx.array(tokens)}, facts)
                partial.rename(self._folder / f"{name}-{_checksum(partial)}.safetensors")
            self._remove_beginnings(prefix.tokens)
        except OSError as error:
            partial.unlink(missing_ok=True)
            if not self._fails:
                LOG.warning("a prompt is not kept on disk: %s", error)
            self._fails = True

    def _remove_beginnings(self, text: Tokens) -> None:
        """Remove the files whose texts another one continues."""
        for path, tokens in [*self._known.items()]:
            if len(tokens) < len(text) and common_prefix(tokens, text) == len(tokens):
                path.unlink(missing_ok=True)

    def _look(self) -> None:
        """Take in the files that processes have written, and drop those that are gone."""
        files = {path for path in self._folder.glob("*.safetensors") if _NAME.fullmatch(path.name)}
        self._known = {path: t for path, t in self._known.items() if path in files}
        for path in files - self._known.keys():
            try:
                self._known[path] = np.array(_read(path)[0]["tokens"], np.int64)
            except (OSError, KeyError, RuntimeError) as error:
                self._forget(path, error)

    def _forget(self, path: Path, error: Exception) -> None:
        self._known.pop(path, None)
        LOG.warning("%s is not used, and removed: %s", path, error)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _read(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Return the arrays of a file, not read yet, and its metadata."""
    found = mx.load(str(path), return_metadata=True)
    return cast("tuple[dict[str, mx.array], dict[str, str]]", found)


def _checksum(path: Path) -> str:
    """Return the CRC-32 of a file, which tells of flipped bits, not of forgery."""
    found = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found = zlib.crc32(chunk, found)
    return f"{found:08x}"


def _form(tree: Arrays | mx.array | None, arrays: dict[str, mx.array]) -> object:
    """Return nested lists of names, and add the arrays by these."""
    if tree is None:
        return None
    if isinstance(tree, mx.array):
        name = f"a{len(arrays)}"
        arrays[name] = tree
        return name
    return [_form(member, arrays) for member in tree]


def _filled(form: object, arrays: dict[str, mx.array]) -> Arrays:
    """Return the arrays as they were nested; raises KeyError or ValueError if they were not."""
    if not isinstance(form, list):
        raise ValueError(f"{form!r:.40} is no list of arrays")
    return tuple(
        None if one is None else arrays[one] if isinstance(one, str) else _filled(one, arrays)
        for one in form
    )
