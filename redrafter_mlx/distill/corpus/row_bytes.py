"""What a row that is written takes, in bytes."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from redrafter_mlx.target.model import Target

_CACHE_STEP = 256
"""Columns by which mlx-lm's batched cache grows."""


def row_bytes(target: Target, columns: int) -> int:
    """Of the keys and values of a row of so many tokens, and of logits of the next."""
    cache = [KVCache() for _ in range(target.n_layers)]
    mx.eval(target.hidden(mx.array([[0]]), cache))
    of_token = sum(a[..., :1, :].nbytes for layer in cache for a in (layer.keys, layer.values))
    return of_token * -(-columns // _CACHE_STEP) * _CACHE_STEP + 12 * target.vocab_size
