"""Safetensors files that hold a SHA-256 of each of their arrays, and of their metadata.

A run resumes from files that it wrote hours or weeks before. A bit that has flipped since on a disk
or in a copy would change what is trained without a word.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import cast

import mlx.core as mx
import numpy as np

from redrafter_mlx.runtime.files.atomic_write import atomic_write

_KEY = "sha256"
"""Key of the metadata with the checksums, as JSON: by array, and "" for the other metadata."""


def save_arrays(path: Path, arrays: Mapping[str, mx.array], metadata: Mapping[str, str]) -> None:
    """Write arrays and metadata, whose `format` names what they are, atomically.

    Raises OSError, naming the file, if it cannot be written.
    """
    sums = {name: _of_array(array) for name, array in arrays.items()}
    sums[""] = _of_metadata(metadata)
    with atomic_write(path) as partial:
        mx.save_safetensors(str(partial), dict(arrays), {**metadata, _KEY: json.dumps(sums)})


def load_arrays(
    path: Path, wanted: str, names: Collection[str] | None = None
) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Return a file's arrays, of those in `names` if given, and its metadata.

    Raises ValueError for another format than `wanted` or a checksum that differs, RuntimeError for
    a file that is no safetensors file.
    """
    loaded = mx.load(str(path), return_metadata=True)
    found, metadata = cast("tuple[dict[str, mx.array], dict[str, str]]", loaded)
    sums = check_metadata(metadata, wanted)
    if {"", *found} != {*sums}:
        raise ValueError("it holds other arrays than were written")
    arrays = {name: found[name] for name in (found if names is None else names) if name in found}
    for name, array in arrays.items():
        if _of_array(array) != sums[name]:
            raise ValueError(f"its {name} has changed since it was written (SHA-256)")
    return arrays, metadata


def check_metadata(metadata: Mapping[str, str], wanted: str) -> dict[str, str]:
    """Return a file's checksums; raises ValueError for another format, or changed metadata."""
    if metadata.get("format") != wanted:
        raise ValueError(f"its format is {metadata.get('format')!r:.80}, not {wanted!r}")
    sums: dict[str, str] = json.loads(metadata[_KEY])
    if sums[""] != _of_metadata(metadata):
        raise ValueError("its header has changed since it was written (SHA-256)")
    return sums


def digest_of(record: Mapping[str, object]) -> str:
    """Return the SHA-256 of a record for JSON."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _of_metadata(metadata: Mapping[str, str]) -> str:
    return digest_of({key: value for key, value in metadata.items() if key != _KEY})


def _of_array(array: mx.array) -> str:
    digest = hashlib.sha256(f"{array.dtype} {array.shape}".encode())
    if array.size:
        digest.update(np.array(mx.contiguous(array).reshape(-1).view(mx.uint8), copy=False).data)
    return digest.hexdigest()
