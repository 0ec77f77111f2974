"""Facts that all ranks must share before they compute together."""

from __future__ import annotations

from importlib import metadata

from redrafter_mlx.distributed.watch import Facts
from redrafter_mlx.target_model.source import TargetSource
from redrafter_mlx.version import __version__
from redrafter_mlx.weights.files.folder import contents_of


def facts_of(source: TargetSource, drafter: object) -> Facts:
    """Return the facts of this rank; `drafter` is the name or object that the caller gave."""
    contents = contents_of(source.path, source.fingerprint)
    libraries = " and ".join(f"{name} {metadata.version(name)}" for name in ("mlx", "mlx-lm"))
    return {
        "version": f"redrafter-mlx {__version__} with {libraries}",
        "model": f"{contents} in {source.dtype}, {source.bits} bits",
        "keys and values": "as they are" if source.kv.kv_bits is None else str(source.kv),
        "drafter": str(drafter) if isinstance(drafter, str) else type(drafter).__name__,
    }
