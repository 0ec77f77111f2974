"""The drafter's logits along texts: each draft is fed with the labels before it."""

from __future__ import annotations

import mlx.core as mx

from redrafter_mlx.distill.corpus.examples import Batch
from redrafter_mlx.drafting.recurrent import BoundNetwork


def output_index(bound: BoundNetwork, vocab_size: int) -> mx.array:
    """[V] int32: which output of the drafter each token is, -1 for what it cannot draft."""
    if bound.tokens is None:
        return mx.arange(vocab_size, dtype=mx.int32)
    index = mx.full((vocab_size,), -1, mx.int32)
    index[bound.tokens] = mx.arange(bound.output_size, dtype=mx.int32)
    return index


def draft_logits(bound: BoundNetwork, batch: Batch) -> list[mx.array]:
    """Logits [P, V'] float32 of each of the T positions, fed with the labels before it."""
    P, T = batch.labels.shape
    context = bound.read(batch.states[:P].astype(mx.float32))
    state = bound.advance(mx.zeros_like(context), batch.roots)
    logits = []
    for depth in range(T):
        logits.append(bound.logits(context, state))
        if depth < T - 1:
            state = bound.advance(state, batch.labels[:, depth])
    return logits
