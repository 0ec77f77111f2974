"""Beam search in the drafter (paper, section 3.2), in one lazy graph of static shape."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import mlx.core as mx

from redrafter_mlx.config import BeamShape
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.speculation.beams import Beams, stacked
from redrafter_mlx.speculation.draft_vocabulary import DraftVocabulary
from redrafter_mlx.speculation.sampling import log_softmax

_MAX_ARGMAX_K = 4
"""Largest k for which `top_k` uses k argmax operations instead of a partition. On Metal a partition
is a full sort, and on a CPU it is no faster (49152 values, k = 4: 0.6 to 2.4 ms against 0.4)."""

_MANY, _MOST_CHUNKS = 32_768, 256
"""Number of values from which `top_k` looks at chunks first, and the largest number of these."""


class Levels(ABC):
    """A drafter's distribution after one root, level by level."""

    def __init__(self, vocabulary: DraftVocabulary) -> None:
        """`vocabulary` are the V' tokens that can be drafted."""
        self.vocabulary = vocabulary

    @abstractmethod
    def first(self) -> mx.array:
        """Logits [B, 1, V'] float32 of the token after the root."""

    @abstractmethod
    def following(self, parents: mx.array, tokens: mx.array) -> mx.array:
        """Logits [B, W, V'] float32 after `tokens` [B, W], which extend the last level's beams.

        parents: [B, W] int32, the beam of the last level that each token extends
        """


def beam_search(levels: Levels, root: mx.array, shape: BeamShape) -> Beams:
    """Return the W likeliest prefixes of each length up to L that start with the root.

    The prefixes of length L are the candidates of the paper. Shorter prefixes that no candidate
    extends are drafts as well.

    Shapes:
      root: [B] int32
    Returns:
      Beams with W = shape.width and L = shape.length, the likeliest first at each length
    """
    W, L = shape.width, shape.length
    check_width(levels.vocabulary.size, W)
    B = root.shape[0]
    tokens = [mx.broadcast_to(root[:, None], (B, W))]
    scores = [mx.zeros((B, W), mx.float32)]
    parents = [mx.zeros((B, W), mx.int32)]
    for level in range(1, L):
        if level == 1:  # every beam is the root alone: extend one
            logits, live = levels.first(), 1
        else:
            logits, live = levels.following(parents[-1], tokens[-1]), W
        check_logits(logits, (B, live, levels.vocabulary.size))
        step = draft_log_probs(logits)  # [B, live, V']
        total = scores[-1][:, :live, None] + step
        best, index = top_k(total.reshape(B, -1), W)
        tokens.append(levels.vocabulary.to_tokens(index % step.shape[-1]))
        scores.append(best)
        parents.append(index // step.shape[-1])
    return stacked(tokens, scores, parents)


def draft_log_probs(logits: mx.array) -> mx.array:
    """Return log-probabilities that are at most 0 despite rounding, and never NaN.

    So no child is likelier than its parent.
    """
    log_probs = log_softmax(logits)
    return mx.minimum(mx.where(mx.isnan(log_probs), -mx.inf, log_probs), 0.0)


def check_logits(logits: mx.array, shape: tuple[int, int, int]) -> None:
    """Raise ValueError, naming both shapes, for a level's logits of another shape."""
    if logits.shape != shape:
        raise ValueError(f"a level's logits have the shape {logits.shape}, not {shape}")


def top_k(x: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """Return the k largest of [B, M], largest first: values [B, k] and int32 indices [B, k].

    The k largest of many values are in the k chunks with the largest maxima. So all values are read
    once, by many threadgroups on Metal, whose reduction of a row runs in a single one.
    """
    B, M = x.shape
    chunks = math.gcd(M, _MOST_CHUNKS)
    if M < _MANY or chunks < 2 * k:
        return _top_k(x, k)
    rows = x.reshape(B, chunks, M // chunks)
    largest = mx.sort(_top_k(mx.max(rows, axis=-1), k)[1], axis=-1)  # of equal values the first
    few = mx.take_along_axis(rows, largest[:, :, None], axis=1)
    values, index = _top_k(few.reshape(B, -1), k)
    chunk = mx.take_along_axis(largest, index // few.shape[2], axis=-1)
    return values, chunk * few.shape[2] + index % few.shape[2]


def _top_k(x: mx.array, k: int) -> tuple[mx.array, mx.array]:
    if k <= _MAX_ARGMAX_K:
        left = mx.maximum(x, mx.finfo(x.dtype).min)  # -inf marks values already taken
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
    """Raise BadInputError for a beam wider than the number of tokens that can be drafted."""
    if output_size < width:
        raise BadInputError(
            f"beam_width is {width}; the drafter can draft only {output_size} tokens"
        )


def select(x: mx.array, beams: mx.array) -> mx.array:
    """Gather x [B, W', D] at `beams` [B, W]."""
    if x.shape[1] == 1:  # no need to gather
        return mx.broadcast_to(x, (*beams.shape, x.shape[2]))
    return mx.take_along_axis(x, beams[:, :, None], axis=1)
