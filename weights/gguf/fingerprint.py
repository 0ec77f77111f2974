"""Fingerprint of a GGUF file, without reading all of it."""

from __future__ import annotations

import hashlib

from redrafter_mlx.weights.gguf.header import GGUFHeader
from redrafter_mlx.weights.registry import REGISTRY

_SAMPLE = 64
"""Bytes that are read from the middle of each tensor."""


def gguf_fingerprint(header: GGUFHeader) -> str:
    """Return "sampled:...", a SHA-256 of the file's size, its header and samples of its tensors.

    Hashing all of a file of 20 GB would take longer than loading it. The fingerprint of a file that
    the registry pins is its SHA-256, "sha256:...", wherever it lies: its samples are known.
    """
    digest = hashlib.sha256()
    for path in header.files:
        tensors = sorted((t.start, t.nbytes) for t in header.tensors.values() if t.path == path)
        digest.update(f"{path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(tensors[0][0] if tensors else -1))
            for start, nbytes in tensors:
                file.seek(start + nbytes // 2)
                digest.update(file.read(min(_SAMPLE, nbytes - nbytes // 2)))
    sampled = digest.hexdigest()
    pinned = (entry.pinned for entry in REGISTRY.values() if entry.pinned is not None)
    return next(
        (f"sha256:{p.sha256}" for p in pinned if p.sampled == sampled), f"sampled:{sampled}"
    )
