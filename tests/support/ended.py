"""Engines that have ended."""

from __future__ import annotations

from redrafter_mlx.engine.engine import Redrafter


def ended(redrafter: Redrafter) -> None:
    """End an engine, with all that it writes."""
    store = redrafter._core._scheduler._prefixes._store
    redrafter.close()
    if store is not None:
        store.close()
