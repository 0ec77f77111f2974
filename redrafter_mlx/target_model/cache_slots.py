"""Sizes of key and value buffers."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx


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
