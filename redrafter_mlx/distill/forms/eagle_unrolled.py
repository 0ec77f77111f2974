"""An EAGLE drafter unrolled over whole texts, with its own output fed back: training-time test.

EAGLE-3 (arXiv 2503.01840), section 3.2: at depth 0 each position of a text has a true row, whose
context is the target's features. At every later depth it has one more row, with the text's next
token. The context of that row is the drafter's own output at the previous depth. So the drafter is
trained on the same rows that it computes when it drafts, at all positions in a few calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import mlx.core as mx

from redrafter_mlx.drafting.published.eagle_network import EagleNetwork


class Sequences(NamedTuple):
    """Whole texts, padded at the end to S positions with features, and T drafts after each.

    Shapes:
      tokens:   [B, S + T] int32
      features: [B, S, C], what the drafter reads from the target
      states:   [B, S, D], the target's last hidden states: the one at i chose token i + 1
      rows:     [M] int32, the positions that are trained on, text by text: b * S + i. The root of
                position i is its next token; its drafts come after the root
      labels:   [M, T] int32, the text's tokens after the root
      valid:    [M, T] bool, False after the end of a text
      hard:     [M] bool, False where the labels are not the target's tokens
    """

    tokens: mx.array
    features: mx.array
    states: mx.array
    rows: mx.array
    labels: mx.array
    valid: mx.array
    hard: mx.array


class UnrolledCache:
    """One layer's keys and values at all depths so far, with the interface of a KV cache.

    The row of position i at depth k has rotary position i + k. It attends to the true rows up to i,
    and at later depths only to the rows of position i. For three positions at depth 2:

        depth 0   1       2
        1 0 0   1 0 0   1 0 0
        1 1 0   0 1 0   0 1 0
        1 1 1   0 0 1   0 0 1
    """

    def __init__(self) -> None:
        self._keys: list[mx.array] = []
        self._values: list[mx.array] = []

    @property
    def offset(self) -> int:
        """Rotary position of the first row of the next call."""
        return len(self._keys)

    def make_mask(self, n: int) -> mx.array:
        """Return [n, n * depths] bool, True = may attend."""
        own = mx.eye(n, dtype=mx.bool_)
        return mx.concatenate([mx.tri(n, dtype=mx.bool_), *[own] * (len(self._keys) - 1)], axis=1)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add one depth; return all keys and values [B, K, n * depths, head size]."""
        self._keys.append(keys)
        self._values.append(values)
        return mx.concatenate(self._keys, axis=2), mx.concatenate(self._values, axis=2)


def unrolled_logits(
    network: EagleNetwork,
    embedding: Callable[[mx.array], mx.array],
    head: Callable[[mx.array], mx.array],
    batch: Sequences,
) -> Iterator[mx.array]:
    """Yield logits [M, V'] float32 for each of the T drafts after `batch.rows`, fed with labels."""
    S, T = batch.features.shape[1], batch.labels.shape[1]
    caches = [UnrolledCache() for _ in network.layers]
    context = network.fuse(batch.features.astype(mx.float32))
    for depth in range(T):
        tokens = batch.tokens[:, depth + 1 : depth + 1 + S]
        hidden = network.forward(embedding(tokens).astype(context.dtype), context, caches)
        trained = hidden.reshape(-1, hidden.shape[-1])[batch.rows]
        yield head(network.normed(trained)).astype(mx.float32)
        context = network.feedback(hidden)
