"""Engines that have ended."""

from __future__ import annotations

from redrafter_mlx.engine.engine import Redrafter


def ended(redrafter: Redrafter) -> None:
    """End an engine, with all that it writes."""
    scheduler = redrafter._core._scheduler
    store, earlier = scheduler._prefixes._store, scheduler._earlier
    redrafter.close()
    for one in (store, earlier):
        if one is not None:
            one.close()
