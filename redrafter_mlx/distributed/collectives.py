"""How long the ranks take to exchange what a call of the target exchanges."""

from __future__ import annotations

import time
from collections.abc import Sequence

import mlx.core as mx

from redrafter_mlx.distributed.commands import CommandWriter
from redrafter_mlx.distributed.group import Ranks
from redrafter_mlx.distributed.mirror import Mirror


def sums(ranks: Ranks, shape: Sequence[int], count: int, after: mx.array | None = None) -> mx.array:
    """So many sums over all ranks, one after the other, of arrays of this shape."""
    total = mx.zeros(tuple(shape))
    if after is not None:
        total = mx.depends(total, after)
    for _ in range(count):
        total = mx.distributed.all_sum(total, group=ranks.group)
    return total


def seconds_of_sums(mirror: Mirror, shape: Sequence[int], count: int) -> float:
    """Seconds that so many sums take, their announcement included."""
    began = time.perf_counter()
    told, _ = mirror.tell("sums", CommandWriter(), shape=list(shape), count=count)
    mirror.last = sums(mirror.ranks, shape, count, told)
    mx.eval(mirror.last)
    return time.perf_counter() - began
