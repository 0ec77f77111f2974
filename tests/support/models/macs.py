"""Simulated Macs, with the working set that Metal recommends for their memory."""

from __future__ import annotations

from redrafter_mlx.weights.fit.machine import Machine

_SHARE_SMALL, _SHARE_LARGE = 2 / 3, 3 / 4
_LARGE = 36
"""Gigabytes from which Metal recommends three quarters of the memory; below, two thirds."""


def mac(gigabytes: int, free_disk: int = 500_000_000_000) -> Machine:
    memory = gigabytes * 2**30
    share = _SHARE_LARGE if gigabytes >= _LARGE else _SHARE_SMALL
    return Machine(memory, int(memory * share), free_disk, on_cpu=False)
