"""The cache of texts of different lengths in one call, and what a text takes in it.

mlx-lm's batched cache makes masks [B, 1, N, T]. Attention that is written out, such as Gemma 2's,
keeps the query heads of one key head apart, and adds its mask to scores [B, K, H / K, N, T].
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

from redrafter_mlx.target.model import Target

_CACHE_STEP = 256
"""Columns by which mlx-lm's batched cache grows."""

_NEAR = 0.05
"""Of the largest coordinate: how far rounding may move a hidden state, in any arithmetic."""


class _GroupedBatchCache(BatchKVCache):  # type: ignore[misc]
    """The same rows, and masks [B, 1, 1, N, T]."""

    def make_mask(self, *args: object, **kwargs: object) -> mx.array:
        mask: mx.array = super().make_mask(*args, **kwargs)
        return mask[:, :, None]


def batch_cache(target: Target) -> type[BatchKVCache] | None:
    """The cache with whose masks a model reads texts together; None if it takes none for each row.

    Where the batch's size happens to be that of another axis, a wrong mask goes unnoticed, so
    the results are compared with those of one row alone.
    """
    padding = [0, 1, 2, 3, 3]
    tokens = mx.array([[0] * n + list(range(1, 5 - n)) for n in padding]) % target.vocab_size
    alone = target.hidden(tokens[-1:, -1:], _layers(target, BatchKVCache, [0]))[0, -1]
    for kind in (BatchKVCache, _GroupedBatchCache):
        try:
            together = target.hidden(tokens, _layers(target, kind, padding))[-1, -1]
            mx.eval(together)
        except ValueError:  # MLX cannot broadcast the mask to the scores
            continue
        error = mx.max(mx.abs(together - alone)) / mx.max(mx.abs(alone))
        if (error < _NEAR).item():
            return kind
    return None


def row_bytes(target: Target, columns: int) -> int:
    """Bytes of a text of so many tokens: its keys and values, and the logits of the next token."""
    cache = [KVCache() for _ in range(target.n_layers)]
    mx.eval(target.hidden(mx.array([[0]]), cache))
    of_token = sum(a[..., :1, :].nbytes for layer in cache for a in (layer.keys, layer.values))
    return of_token * -(-columns // _CACHE_STEP) * _CACHE_STEP + 12 * target.vocab_size


def _layers(target: Target, kind: type[BatchKVCache], padding: list[int]) -> list[BatchKVCache]:
    return [kind(padding) for _ in range(target.n_layers)]
