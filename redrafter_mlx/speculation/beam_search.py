"""The search of a drafter's levels, and beam search (paper, section 3.2).

A search is one lazy graph of static shape. What is kept of each level is its only parameter: the
likeliest candidates, those along given ranks (`static_tree.py`), or drawn ones (`rejection.py`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from redrafter_mlx.config import BeamShape
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.speculation.draft_vocabulary import DraftVocabulary
from redrafter_mlx.speculation.sampling import log_softmax

_MAX_ARGMAX_K = 4
"""Largest k for which `top_k` uses k argmax operations instead of a partition. On Metal a partition
is a full sort, and on a CPU it is no faster (49152 values, k = 4: 0.6 to 2.4 ms against 0.4)."""

_MANY, _MAX_CHUNKS = 32_768, 256
"""Number of values from which `top_k` looks at chunks first, and the largest number of these."""


class Levels(ABC):
    """A drafter's distribution after one root, level by level.

    independent: whether a level is the same after all prefixes
    """

    independent: bool = False

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


class Kept(NamedTuple):
    """What a search keeps of one level's candidates: K prefixes, at most W.

    A candidate is one of the X extended prefixes, followed by one of the drafter's V' outputs.

    Shapes:
      origins:  [B, K] int32, the extended prefix that each continues, from 0 to X - 1
      outputs:  [B, K] int32, the output that follows it
      scores:   [B, K] float32, never above the parent's
      extended: [B, X] int32, those of the K that the next level extends; None for all
    """

    origins: mx.array
    outputs: mx.array
    scores: mx.array
    extended: mx.array | None = None


Choose = Callable[[int, mx.array, mx.array], Kept]
"""Chooses among a level's candidates, given the level, from 1 to L - 1, the drafter's logits
[B, X, V'], and the scores [B, X] of the prefixes that are extended."""


def search(levels: Levels, root: mx.array, shape: BeamShape, choose: Choose) -> Beams:
    """Extend the root level by level with the candidates that `choose` keeps.

    Shapes:
      root: [B] int32
    Returns:
      Beams with W = shape.width and L = shape.length; at each length the prefixes that were kept,
      in their order, then padding
    """
    B, W = root.shape[0], shape.width
    tokens = [mx.broadcast_to(root[:, None], (B, W))]
    scores = [mx.zeros((B, W), mx.float32)]
    parents = [mx.zeros((B, W), mx.int32)]
    # The prefixes that are extended, of which there is one at first: every prefix is the root.
    origins, last, above = parents[0][:, :1], tokens[0][:, :1], scores[0][:, :1]
    extended: mx.array | None = None
    for level in range(1, shape.length):
        logits = levels.first() if level == 1 else levels.following(origins, last)
        check_logits(logits, (B, above.shape[1], levels.vocabulary.size))
        kept = choose(level, logits, above)
        origins, last, above = kept.origins, levels.vocabulary.to_tokens(kept.outputs), kept.scores
        parent = origins if extended is None else mx.take_along_axis(extended, origins, axis=1)
        tokens.append(_padded(last, W, 0))
        scores.append(_padded(above, W, -mx.inf))
        parents.append(_padded(parent, W, 0))
        if (extended := kept.extended) is not None:
            origins, last, above = (
                mx.take_along_axis(x, extended, axis=1) for x in (origins, last, above)
            )
    return Beams(
        mx.stack(tokens, axis=2), mx.stack(scores, axis=2), mx.stack(parents, axis=2), True
    )


def beam_search(levels: Levels, root: mx.array, shape: BeamShape) -> Beams:
    """Return the W likeliest prefixes of each length up to L that start with the root [B].

    The prefixes of length L are the candidates of the paper. Shorter prefixes that no candidate
    extends are drafts as well.

    With as many beams as drafts, `pack_beam` keeps the likeliest nodes of all trees of that depth:
    each of them has its ancestors among them, and fewer likelier ones at its length. For
    independent levels that is DDTree (arXiv 2604.12989).
    """
    W = shape.width
    check_width(levels.vocabulary.size, W)

    def of_one_level(_: int, logits: mx.array, above: mx.array) -> Kept:
        """As `likeliest`, among the level's W likeliest tokens alone."""
        log_probs, outputs = top_k(draft_log_probs(logits[:, 0]), W)
        total = above[:, :, None] + log_probs[:, None]  # [B, X, W]
        best, index = top_k(total.reshape(total.shape[0], -1), W)
        return Kept(index // W, mx.take_along_axis(outputs, index % W, axis=1), best)

    def likeliest(_: int, logits: mx.array, above: mx.array) -> Kept:
        total = above[:, :, None] + draft_log_probs(logits)  # [B, X, V']
        best, index = top_k(total.reshape(total.shape[0], -1), W)
        return Kept(index // total.shape[2], index % total.shape[2], best)

    return search(levels, root, shape, of_one_level if levels.independent else likeliest)


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


def _padded(x: mx.array, width: int, value: float) -> mx.array:
    missing = width - x.shape[1]
    return mx.pad(x, [(0, 0), (0, missing)], constant_values=value) if missing else x


def top_k(x: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """Return the k largest of [B, M], largest first: values [B, k] and int32 indices [B, k].

    The k largest of many values are in the k chunks with the largest maxima. So all values are read
    once, by many threadgroups on Metal, whose reduction of a row runs in a single one.
    """
    B, M = x.shape
    chunks = math.gcd(M, _MAX_CHUNKS)
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
