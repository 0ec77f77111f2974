"""Sizes of key and value buffers."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from redrafter_mlx.runtime.device import backend

CAPACITY_STEP = 256
"""Buffers grow in steps of this many slots, so that they are rarely copied."""

SPARE_STEP = 32
"""Copies of a cache, which nothing may be appended to for long, end at a multiple of this many
slots."""

EXTENT_STEPS = {"cpu": 64, "apple": CAPACITY_STEP, "cuda": 128}
"""Attention reads the buffers up to the bound of the length, rounded up to a multiple of this many
slots, or in long texts by up to an eighth: each extent needs its own compiled graph. A CPU computes
attention over 32 slots too many for half a millisecond a row, and compiles a graph for some 40;
with hundreds too many it would take longer. A GPU hardly notices them (Metal's kernel for few query
rows reads no masked slot), and waits while the host builds."""


def grown(buffer: mx.array, capacity: int) -> mx.array:
    """Return a buffer [B, K, T, head size] with zeros after it, `capacity` slots in all."""
    B, K, known, size = buffer.shape
    larger = mx.zeros((B, K, capacity, size), buffer.dtype)
    larger[:, :, :known] = buffer  # in place; a concatenation would hold the new zeros twice
    return larger


def round_up(n: int, step: int) -> int:
    """Round `n` up to a multiple of `step`."""
    return -(-n // step) * step


def concatenate_padded(arrays: Sequence[mx.array]) -> mx.array:
    """Concatenate arrays [B, ...] along the batch; zeros pad the other axes to equal sizes."""
    largest = [max(sizes) for sizes in zip(*(a.shape[1:] for a in arrays), strict=True)]

    def padded(a: mx.array) -> mx.array:
        missing = [n - m for n, m in zip(largest, a.shape[1:], strict=True)]
        # MLX would copy an array to pad it by nothing.
        return mx.pad(a, [(0, 0), *((0, n) for n in missing)]) if any(missing) else a

    return mx.concatenate([padded(a) for a in arrays])


def planned_capacity(length: int, nodes: int) -> int:
    """Return the capacity that a tree of `nodes` nodes after `length` positions needs."""
    return capacity_of(extent_of(length + nodes))


def capacity_of(extent: int) -> int:
    """Return the capacity of buffers of which attention reads `extent` slots."""
    return round_up(extent, CAPACITY_STEP)


def extent_of(slots: int) -> int:
    """Return the number of slots that attention reads of the first `slots`; see EXTENT_STEPS."""
    return round_up(slots, max(EXTENT_STEPS[backend()], (1 << slots.bit_length()) >> 4))
