"""Time that one call of the target spends on communication between the ranks."""

from __future__ import annotations

import time

import mlx.core as mx

from redrafter_mlx.distributed.commands import CommandWriter
from redrafter_mlx.distributed.group import Ranks
from redrafter_mlx.distributed.mirror import Mirror
from redrafter_mlx.target_model.model import Target


def sums(ranks: Ranks, total: mx.array, count: int) -> mx.array:
    """Sum an array over all ranks `count` times, one sum after the other."""
    for _ in range(count):
        total = mx.distributed.all_sum(total, group=ranks.group)
    return total


def seconds_of_exchange(
    mirror: Mirror, target: Target, rows: int, command_only: bool = False
) -> float:
    """Return the seconds of communication for one call on a tree of `rows` nodes.

    The call itself is not made. The ranks exchange the command, with the tree in it, and two sums
    per layer; `command_only` leaves out the sums.
    """
    began, count = time.perf_counter(), 0 if command_only else 2 * target.n_layers
    zeros = mx.zeros((1, rows, target.hidden_size), target.dtype)
    writer = CommandWriter()
    for tree in ((1, rows), (1, rows), (1, rows, rows)):  # tokens, depths and mask
        writer.array(mx.zeros(tree, mx.int32))
    sent, _ = mirror.announce("sums", writer, rows=rows, count=count)
    mirror.last = sums(mirror.ranks, mx.depends(zeros, sent), count)
    mx.eval(mirror.last)
    return time.perf_counter() - began
