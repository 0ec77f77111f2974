"""Writes and allocates the slots of key and value buffers."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx


def write_slots(buffer: mx.array, new: mx.array, slots: mx.array) -> mx.array:
    """Write `new` [B, K, R, head size] to the slots [B, R] of `buffer` [B, K, T, head size].

    In place, if nothing else refers to the buffer: one kernel, where `mx.slice_update` at an array
    start needs two.
    """
    index = mx.broadcast_to(slots[:, None, :, None], new.shape)
    return mx.put_along_axis(buffer, index, new, axis=2)


def with_capacity(buffer: mx.array | None, new: mx.array, capacity: int) -> mx.array:
    """Grow the buffer with zeros to at least `capacity` slots, in the shape and type of `new`."""
    B, K, _, size = new.shape
    if buffer is None:
        return mx.zeros((B, K, capacity, size), new.dtype)
    known = buffer.shape[2]
    if known >= capacity:
        return buffer
    grown = mx.zeros((B, K, capacity, size), new.dtype)
    grown[:, :, :known] = buffer  # in place; a concatenation would hold the new zeros twice
    return grown


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
