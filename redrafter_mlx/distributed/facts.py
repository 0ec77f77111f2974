"""Facts that all ranks must share before they compute together."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

from redrafter_mlx.distributed.watch import Facts
from redrafter_mlx.target.source import TargetSource
from redrafter_mlx.version import __version__

_SAMPLES, _BYTES = 64, 64
"""Number of samples per weight file, and bytes per sample."""


def facts_of(source: TargetSource, drafter: object) -> Facts:
    """Return the facts of this rank; `drafter` is the name or object that the caller gave."""
    weights = _sampled(source.path)
    libraries = " and ".join(f"{name} {metadata.version(name)}" for name in ("mlx", "mlx-lm"))
    return {
        "version": f"redrafter-mlx {__version__} with {libraries}",
        "model": f"{source.fingerprint} ({weights}) in {source.dtype}, {source.bits} bits",
        "drafter": str(drafter) if isinstance(drafter, str) else type(drafter).__name__,
    }


def _sampled(folder: Path) -> str:
    """Return a hash of samples from all weight files, to distinguish models of one architecture.

    A GGUF file is treated as an empty folder: its fingerprint already covers all its weights.
    """
    digest = hashlib.sha256()
    for file in sorted(folder.glob("model*.safetensors")):
        size = file.stat().st_size
        with file.open("rb") as data:
            for i in range(_SAMPLES):
                data.seek(size * i // _SAMPLES)
                digest.update(data.read(_BYTES))
    return digest.hexdigest()[:16]
