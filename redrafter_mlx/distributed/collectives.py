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


def seconds_of_exchange(
    mirror: Mirror, target: Target, rows: int, told_only: bool = False
) -> float:
    """Seconds that the ranks exchange for one call on a tree of so many nodes, without the call.

    That is the command, with the tree in it, and two sums a layer; `told_only` leaves these out.
    """
    began, count = time.perf_counter(), 0 if told_only else 2 * target.n_layers
    zeros = mx.zeros((1, rows, target.hidden_size), target.dtype)
    writer = CommandWriter()
    for tree in ((1, rows), (1, rows), (1, rows, rows)):  # tokens, depths and mask
        writer.array(mx.zeros(tree, mx.int32))
    told, _ = mirror.tell("sums", writer, rows=rows, count=count)
    mirror.last = sums(mirror.ranks, mx.depends(zeros, told), count)
    mx.eval(mirror.last)
    return time.perf_counter() - began
