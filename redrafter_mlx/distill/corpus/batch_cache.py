"""The KV cache for texts of different lengths in one call, and the memory of a text in it.

mlx-lm's batched cache makes masks [B, 1, N, T]. Attention without a fused kernel, such as Gemma
2's, groups the query heads by key head, and adds its mask to scores [B, K, H / K, N, T].
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

from redrafter_mlx.target.model import Target

_CACHE_STEP = 256
"""Number of cache slots by which mlx-lm's batched cache grows."""

_NEAR = 0.05
"""Maximum rounding error of a hidden state, in any type, as a share of its largest coordinate."""


class _GroupedBatchCache(BatchKVCache):  # type: ignore[misc]
    """The same cache with masks [B, 1, 1, N, T]."""

    def make_mask(self, *args: object, **kwargs: object) -> mx.array:
        mask: mx.array = super().make_mask(*args, **kwargs)
        return mask[:, :, None]


def batch_cache(target: Target) -> type[BatchKVCache] | None:
    """Return the cache class for reading texts together; None if the model takes no row masks.

    If the batch size happens to equal the size of another axis, a wrong mask raises no error. So
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
    """Return the bytes of a text of `columns` tokens: keys and values, and next-token logits."""
    cache = [KVCache() for _ in range(target.n_layers)]
    mx.eval(target.hidden(mx.array([[0]]), cache))
    of_token = sum(a[..., :1, :].nbytes for layer in cache for a in (layer.keys, layer.values))
    return of_token * -(-columns // _CACHE_STEP) * _CACHE_STEP + 12 * target.vocab_size


def _layers(target: Target, kind: type[BatchKVCache], padding: list[int]) -> list[BatchKVCache]:
    return [kind(padding) for _ in range(target.n_layers)]
