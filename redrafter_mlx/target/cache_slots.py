"""Rows of key and value buffers: gathered, written, and given room to grow."""

from __future__ import annotations

import mlx.core as mx


def gather_rows(rows: mx.array, index: mx.array) -> mx.array:
    """Rows [B, K, M, head size] at `index` [B, R], giving [B, K, R, head size]."""
    if rows.shape[0] == 1:
        return mx.take(rows, index[0], axis=2)
    B, K, _, size = rows.shape
    full = mx.broadcast_to(index[:, None, :, None], (B, K, index.shape[1], size))
    return mx.take_along_axis(rows, full, axis=2)


def write_rows(buffer: mx.array, rows: mx.array, start: mx.array) -> mx.array:
    """`buffer` [B, K, T, head size] with `rows` [B, K, R, head size] from row `start` [B] on."""
    if buffer.shape[0] == 1:
        return mx.slice_update(buffer, rows, start, axes=(2,))
    place = start[:, None] + mx.arange(rows.shape[2])[None]
    index = mx.broadcast_to(place[:, None, :, None], rows.shape)
    return mx.put_along_axis(buffer, index, rows, axis=2)


def with_capacity(buffer: mx.array | None, rows: mx.array, capacity: int) -> mx.array:
    """The buffer with at least `capacity` rows, zeros behind what it holds."""
    B, K, _, size = rows.shape
    if buffer is None:
        return mx.zeros((B, K, capacity, size), rows.dtype)
    missing = capacity - buffer.shape[2]
    if missing <= 0:
        return buffer
    return mx.concatenate([buffer, mx.zeros((B, K, missing, size), rows.dtype)], axis=2)


def round_up(n: int, step: int) -> int:
    return -(-n // step) * step
