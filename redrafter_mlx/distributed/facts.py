"""What ranks must have in common before they compute together."""

from __future__ import annotations

from importlib import metadata

from redrafter_mlx.distributed.watch import Facts
from redrafter_mlx.target.source import TargetSource
from redrafter_mlx.version import __version__


def facts_of(source: TargetSource, drafter: object) -> Facts:
    """Of this rank; `drafter` is what the caller named."""
    return {
        "version": f"redrafter-mlx {__version__} with mlx {metadata.version('mlx')}",
        "model": f"{source.fingerprint} in {source.dtype}, {source.bits} bits",
        "drafter": str(drafter) if isinstance(drafter, str) else type(drafter).__name__,
    }
