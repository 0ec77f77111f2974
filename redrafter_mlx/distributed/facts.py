"""What ranks must have in common before they compute together."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

from redrafter_mlx.distributed.watch import Facts
from redrafter_mlx.target.source import TargetSource
from redrafter_mlx.version import __version__

_SAMPLES, _BYTES = 64, 64
"""Of each weight file: how many pieces, and how long."""


def facts_of(source: TargetSource, drafter: object) -> Facts:
    """Of this rank; `drafter` is what the caller named."""
    weights = _sampled(source.path)
    libraries = " and ".join(f"{name} {metadata.version(name)}" for name in ("mlx", "mlx-lm"))
    return {
        "version": f"redrafter-mlx {__version__} with {libraries}",
        "model": f"{source.fingerprint} ({weights}) in {source.dtype}, {source.bits} bits",
        "drafter": str(drafter) if isinstance(drafter, str) else type(drafter).__name__,
    }


def _sampled(folder: Path) -> str:
    """A hash over a little of a folder's weights everywhere, which tells models of one form apart.

    The fingerprint of a GGUF file is of all its weights; here it counts as an empty folder.
    """
    digest = hashlib.sha256()
    for file in sorted(folder.glob("model*.safetensors")):
        size = file.stat().st_size
        with file.open("rb") as data:
            for i in range(_SAMPLES):
                data.seek(size * i // _SAMPLES)
                digest.update(data.read(_BYTES))
    return digest.hexdigest()[:16]
