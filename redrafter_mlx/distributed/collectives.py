"""How long the ranks take to exchange what a call of the target exchanges."""

from __future__ import annotations

import time

import mlx.core as mx

from redrafter_mlx.distributed.commands import CommandWriter
from redrafter_mlx.distributed.group import Ranks
from redrafter_mlx.distributed.mirror import Mirror
from redrafter_mlx.target.model import Target


def sums(ranks: Ranks, total: mx.array, count: int) -> mx.array:
    """So many sums over all ranks, one after the other, of arrays like this one."""
    for _ in range(count):
        total = mx.distributed.all_sum(total, group=ranks.group)
    return total


def seconds_of_exchange(mirror: Mirror, target: Target, rows: int) -> float:
    """Seconds that the ranks' sums of one call on so many rows take without the call.

    Two a layer, and what announces the call.
    """
    began, count = time.perf_counter(), 2 * target.n_layers
    zeros = mx.zeros((1, rows, target.hidden_size), target.dtype)
    told, _ = mirror.tell("sums", CommandWriter(), rows=rows, count=count)
    mirror.last = sums(mirror.ranks, mx.depends(zeros, told), count)
    mx.eval(mirror.last)
    return time.perf_counter() - began
