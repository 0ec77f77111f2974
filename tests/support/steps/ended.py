"""Engines that have ended."""

from __future__ import annotations

from redrafter_mlx.engine.engine import Redrafter


def ended(redrafter: Redrafter) -> None:
    """End an engine, with all that it writes."""
    scheduler = redrafter.core.scheduler
    store, earlier = scheduler.prefixes.store, scheduler.earlier
    redrafter.close()
    for one in (store, earlier):
        if one is not None:
            one.close()
