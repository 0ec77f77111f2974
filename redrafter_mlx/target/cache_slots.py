"""Gathers, writes and allocates the slots of key and value buffers."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx


def gather_slots(buffer: mx.array, index: mx.array) -> mx.array:
    """Gather slots `index` [B, R] of [B, K, M, head size], giving [B, K, R, head size]."""
    if buffer.shape[0] == 1:
        return mx.take(buffer, index[0], axis=2)
    B, K, _, size = buffer.shape
    full = mx.broadcast_to(index[:, None, :, None], (B, K, index.shape[1], size))
    return mx.take_along_axis(buffer, full, axis=2)


def write_slots(buffer: mx.array, new: mx.array, start: mx.array) -> mx.array:
    """Write `new` [B, K, R, head size] to `buffer` [B, K, T, head size] from slot `start` [B]."""
    if buffer.shape[0] == 1:
        return mx.slice_update(buffer, new, start, axes=(2,))
    slots = start[:, None] + mx.arange(new.shape[2])[None]
    index = mx.broadcast_to(slots[:, None, :, None], new.shape)
    return mx.put_along_axis(buffer, index, new, axis=2)


def with_capacity(buffer: mx.array | None, new: mx.array, capacity: int) -> mx.array:
    """Grow the buffer with zeros to at least `capacity` slots, in the shape and type of `new`."""
    B, K, _, size = new.shape
    if buffer is None:
        return mx.zeros((B, K, capacity, size), new.dtype)
    missing = capacity - buffer.shape[2]
    if missing <= 0:
        return buffer
    return mx.concatenate([buffer, mx.zeros((B, K, missing, size), new.dtype)], axis=2)


def round_up(n: int, step: int) -> int:
    """Round `n` up to a multiple of `step`."""
    return -(-n // step) * step


def concatenate_padded(arrays: Sequence[mx.array]) -> mx.array:
    """Concatenate arrays [B, ...] along the batch; zeros pad the other axes to equal sizes."""
    largest = [max(sizes) for sizes in zip(*(a.shape[1:] for a in arrays), strict=True)]
    return mx.concatenate(
        [
            mx.pad(a, [(0, 0), *((0, n - m) for n, m in zip(largest, a.shape[1:], strict=True))])
            for a in arrays
        ]
    )
