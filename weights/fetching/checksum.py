"""SHA-256 of large files, cached on disk.

A cached checksum is valid only for the exact size and modification time (nanoseconds) that the file
had when it was read; a file that differs in either is read again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from pathlib import Path

from redrafter_mlx.runtime.files.atomic_write import write_private_text
from redrafter_mlx.runtime.files.paths import cache_dir
from redrafter_mlx.weights import Progress, no_progress

_BLOCK = 1 << 20
WORTH_REMEMBERING = 16 * _BLOCK
"""Minimum file size in bytes for caching; smaller files are read again at less cost."""


def sha256_of(path: Path, progress: Progress = no_progress) -> str:
    """Return the SHA-256 of a file in hexadecimal, from the cache if the file has not changed."""
    path = path.resolve()
    before = _state(path)
    known = _remembered(path, before)
    if known is not None:
        return known
    digest = _read(path, progress)
    if before[0] >= WORTH_REMEMBERING and _state(path) == before:
        with contextlib.suppress(OSError):  # a cache that cannot be written is no error
            write_private_text(_note(path), json.dumps({"state": before, "sha256": digest}))
    return digest


def known_sha256(path: Path) -> str | None:
    """Return the SHA-256 of a file if it is known without reading it: cached, or by its name.

    In the Hub's cache, a file's name is its SHA-256 if it is large. A small file is read.
    """
    path = path.resolve()
    if path.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", path.name):
        return path.name
    state = _state(path)
    return sha256_of(path) if state[0] < WORTH_REMEMBERING else _remembered(path, state)


def is_intact(path: Path, sha256: str, size: int, progress: Progress = no_progress) -> bool:
    """Whether a file exists, is readable, and has this size and this SHA-256."""
    try:
        return path.stat().st_size == size and sha256_of(path, progress) == sha256
    except OSError:
        return False


def _remembered(path: Path, state: list[int]) -> str | None:
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        remembered = json.loads(_note(path).read_text(encoding="utf-8"))
        if remembered["state"] == state:
            return str(remembered["sha256"])
    return None


def _read(path: Path, progress: Progress) -> str:
    digest, done, size = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            done += len(block)
            progress(f"checking {path.name}", done, size)
    return digest.hexdigest()


def _state(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def _note(path: Path) -> Path:
    return cache_dir() / "checksums" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()}.json"
