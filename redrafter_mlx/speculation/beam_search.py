"""Beam search in the drafter (paper, section 3.2), in one lazy graph of static shape."""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from redrafter_mlx.config import BeamShape
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.speculation.sampling import log_softmax
from redrafter_mlx.speculation.tree import Beams

_FEW = 4
"""Up to so many are found by one argmax each: on Metal a partition is a full sort, and on a CPU it
is no faster (49152 values, k = 4: 0.4 ms against 0.6 to 2.4)."""


class DraftModel(Protocol):
    """What beam search asks of a drafter."""

    @property
    def output_size(self) -> int: ...

    def advance(self, state: mx.array, tokens: mx.array) -> mx.array: ...

    def logits(self, context: mx.array, state: mx.array) -> mx.array: ...

    def to_tokens(self, outputs: mx.array) -> mx.array: ...


def beam_search(model: DraftModel, context: mx.array, root: mx.array, shape: BeamShape) -> Beams:
    """The W likeliest prefixes of each length up to L that start with the root.

    Those of length L are the candidates of the paper; those on the way there that none of them
    begins with are drafts as well.

    Shapes:
      context: [B, D], what the drafter read of the target's hidden state behind the root's
               predecessor
      root:    [B] int32
    Returns:
      Beams with W = shape.width and L = shape.length, the likeliest of each length first
    """
    W, L = shape.width, shape.length
    check_width(model.output_size, W)
    B, D = context.shape
    tokens = [mx.broadcast_to(root[:, None], (B, W))]
    scores = [mx.zeros((B, W), mx.float32)]
    origins = [mx.zeros((B, W), mx.int32)]
    # All begin alike, so the first extension looks at one of them only.
    state = None if L == 1 else model.advance(mx.zeros((B, 1, D), context.dtype), root[:, None])
    for level in range(1, L):
        assert state is not None
        live = state.shape[1]
        around = mx.broadcast_to(context[:, None], (B, live, D))
        # [B, live, V']
        step = _no_better_than_certain(log_softmax(model.logits(around, state)))
        total = scores[-1][:, :live, None] + step
        best, where = top_k(total.reshape(B, -1), W)
        parent, output = where // step.shape[-1], where % step.shape[-1]
        tokens.append(model.to_tokens(output))
        scores.append(best)
        origins.append(parent)
        if level < L - 1:
            state = model.advance(select(state, parent), tokens[-1])
    return Beams(*(mx.stack(levels, axis=2) for levels in (tokens, scores, origins)))


def top_k(x: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """The k largest of [B, M], largest first: values [B, k] and int32 indices [B, k]."""
    if k <= _FEW:
        left = mx.maximum(x, mx.finfo(x.dtype).min)  # -inf is for those that were taken
        taken: list[mx.array] = []
        for _ in range(k):
            if taken:
                left = mx.put_along_axis(left, taken[-1], mx.array(-mx.inf, x.dtype), axis=-1)
            taken.append(mx.argmax(left, axis=-1, keepdims=True))
        index = mx.concatenate(taken, axis=-1)
    else:
        index = mx.argpartition(-x, kth=k - 1, axis=-1)[:, :k]
        order = mx.argsort(-mx.take_along_axis(x, index, axis=-1), axis=-1)
        index = mx.take_along_axis(index, order, axis=-1)
    return mx.take_along_axis(x, index, axis=-1), index.astype(mx.int32)


def check_width(output_size: int, width: int) -> None:
    """Raise BadInputError for a beam wider than what a drafter can draft."""
    if output_size < width:
        raise BadInputError(
            f"beam_width is {width}; the drafter can draft only {output_size} tokens"
        )


def select(x: mx.array, beams: mx.array) -> mx.array:
    """Rows of x [B, W', ...] at `beams` [B, W]."""
    return mx.take_along_axis(x, beams[:, :, None], axis=1)


def _no_better_than_certain(log_probs: mx.array) -> mx.array:
    """At most 0 in spite of rounding, and never NaN: a child is never likelier than its parent."""
    return mx.minimum(mx.where(mx.isnan(log_probs), -mx.inf, log_probs), 0.0)
