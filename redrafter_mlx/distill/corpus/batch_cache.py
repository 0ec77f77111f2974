"""The KV cache for texts of different lengths in one call, and the memory of a text in it."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

from redrafter_mlx.target.model import Target

_CACHE_STEP = 256
"""Number of cache slots by which mlx-lm's batched cache grows."""


def batch_cache(target: Target) -> type[BatchKVCache] | None:
    """Return the cache class for reading texts together; None if the model takes no row masks."""
    return BatchKVCache if target.row_masks else None


def row_bytes(target: Target, columns: int) -> int:
    """Return the bytes of a text of `columns` tokens: keys and values, and next-token logits."""
    cache = [KVCache() for _ in range(target.n_layers)]
    mx.eval(target.hidden(mx.array([[0]]), cache))
    of_token = sum(a[..., :1, :].nbytes for layer in cache for a in (layer.keys, layer.values))
    return of_token * -(-columns // _CACHE_STEP) * _CACHE_STEP + 12 * target.vocab_size
