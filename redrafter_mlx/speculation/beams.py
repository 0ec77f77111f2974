"""Beams: the prefixes that a search found, of each length, before they are merged into a tree."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from redrafter_mlx.speculation.constants import iota


class Beams(NamedTuple):
    """W prefixes of each length up to L, all starting with the same root.

    Shapes:
      tokens:    [B, W, L] int32, tokens[b, w, l] is the last token of prefix w of l + 1 tokens; the
                 root at l = 0
      log_probs: [B, W, L] float32, of those prefixes; 0 at the root and never above the parent's;
                 -inf where there is no prefix: its token is undefined
      parents:   [B, W, L] int32, the parent's index among the prefixes that are one token shorter;
                 undefined at l = 0; None if every parent has index w too, so that tokens[b, w] is a
                 candidate

    distinct: static; no two prefixes of a length, but for the root, have the same tokens, as in one
              drafter's search
    """

    tokens: mx.array
    log_probs: mx.array
    parents: mx.array | None = None
    distinct: bool = False

    def take(self, rows: mx.array) -> Beams:
        """Return the beams of some batch rows."""
        parents = None if self.parents is None else self.parents[rows]
        return Beams(self.tokens[rows], self.log_probs[rows], parents, self.distinct)

    @property
    def parent_indices(self) -> mx.array:
        """[B, W, L] int32: `parents`, or index w everywhere if it is None."""
        if self.parents is not None:
            return self.parents
        return mx.broadcast_to(iota(self.tokens.shape[1])[None, :, None], self.tokens.shape)


def join_beams(first: Beams, second: Beams) -> Beams:
    """Join the prefixes of two drafters; a prefix that both propose gets the better score.

    So a parent is never less likely than its child, even if the drafters disagree on both.
    """
    first, second = _equally_long(first, second)
    W = first.tokens.shape[1]
    both = Beams(
        mx.concatenate([first.tokens, second.tokens], axis=1),
        mx.concatenate([first.log_probs, second.log_probs], axis=1),
        mx.concatenate([first.parent_indices, second.parent_indices + W], axis=1),
    )
    return _with_best_scores(both)


def repaired(beams: Beams, root: mx.array, vocab_size: int) -> Beams:
    """Return beams that are well-formed, whatever was drafted; those that are stay as they are.

    The root is `root`. A prefix does not exist if its token is not in the vocabulary, its parent
    does not exist, or its score is NaN. No score is above the parent's, and of equal prefixes all
    have the best score.

    Shapes:
      root: [B] int32
      beams.tokens, beams.parents: of any integer type; beams.log_probs: of any real type
    """
    B, W, L = beams.tokens.shape
    ids, scores = beams.tokens.astype(mx.int64), beams.log_probs.astype(mx.float32)
    exists = (ids >= 0) & (ids < vocab_size) & mx.logical_not(mx.isnan(scores))
    parents = beams.parent_indices.astype(mx.int64)
    inside = (parents >= 0) & (parents < W)
    scores = mx.where(exists & inside, scores, -mx.inf)
    parents = mx.where(inside, parents, 0).astype(mx.int32)
    best = [mx.zeros((B, W))]
    for level in range(1, L):
        above = mx.take_along_axis(best[-1], parents[:, :, level], axis=1)
        best.append(mx.minimum(scores[:, :, level], above))
    tokens = mx.where(exists, ids, 0).astype(mx.int32)
    tokens = mx.where(iota(L) == 0, root[:, None, None], tokens)
    return _with_best_scores(Beams(tokens, mx.stack(best, axis=2), parents))


def _with_best_scores(beams: Beams) -> Beams:
    """Give each prefix the best score of all prefixes with the same tokens."""
    owner = owners(lineages(beams))
    shared = owner[:, :, None] == owner[:, None]  # [B, W, W, L]
    best = mx.max(mx.where(shared, beams.log_probs[:, None], -mx.inf), axis=2)
    return beams._replace(log_probs=best)


def likelier_candidate(first: Beams, second: Beams) -> Beams:
    """Return, per batch row, the beam [B, 1, L] with more drafts expected to be accepted."""
    first, second = _equally_long(first, second)
    expected = [mx.sum(mx.exp(beams.log_probs[:, :, 1:]), axis=2) for beams in (first, second)]
    better = (expected[1] > expected[0])[:, :, None]
    return Beams(
        mx.where(better, second.tokens, first.tokens),
        mx.where(better, second.log_probs, first.log_probs),
    )


def _equally_long(first: Beams, second: Beams) -> tuple[Beams, Beams]:
    """Pad the shorter of two beams to the length of the other."""
    length = max(first.tokens.shape[2], second.tokens.shape[2])
    return _lengthened(first, length), _lengthened(second, length)


def _lengthened(beams: Beams, length: int) -> Beams:
    B, W, L = beams.tokens.shape
    after = [(0, 0), (0, 0), (0, length - L)]
    itself = mx.broadcast_to(iota(W)[None, :, None], (B, W, length - L))
    return Beams(
        mx.pad(beams.tokens, after),
        mx.pad(beams.log_probs, after, constant_values=-mx.inf),
        mx.concatenate([beams.parent_indices, itself], axis=2),
        beams.distinct,
    )


def lineages(beams: Beams) -> mx.array:
    """Return the path to each prefix, as the first index of the same tokens at each length.

    Returns:
      [B, W, L, L] int32; [b, w, l, k] is the least v whose prefix of k + 1 tokens starts prefix w
      of l + 1 tokens, for k <= l; 0 for k > l
    """
    B, W, L = beams.tokens.shape
    index = iota(W)
    # Where there is no prefix, use a token that equals no other.
    tokens = mx.where(beams.log_probs > -mx.inf, beams.tokens, -1 - index[None, :, None])
    parents = beams.parent_indices
    path = mx.zeros((B, W, 1), mx.int32)
    paths = [path]
    for level in range(1, L):
        before = mx.take_along_axis(path, parents[:, :, level, None], axis=1)
        first = mx.broadcast_to(index, (B, W))
        if not beams.distinct:
            token, parent = tokens[:, :, level], before[:, :, -1]
            same = (token[:, :, None] == token[:, None]) & (parent[:, :, None] == parent[:, None])
            first = mx.min(mx.where(same, index, W), axis=2).astype(mx.int32)
        path = mx.concatenate([before, first[:, :, None]], axis=2)
        paths.append(path)
    return mx.stack([mx.pad(p, [(0, 0), (0, 0), (0, L - p.shape[2])]) for p in paths], axis=2)


def owners(paths: mx.array) -> mx.array:
    """Return [B, W, L]: for each prefix, the first index that has the same tokens."""
    L = paths.shape[2]
    last = mx.broadcast_to(iota(L)[None, None, :, None], (*paths.shape[:3], 1))
    return mx.take_along_axis(paths, last, axis=3)[..., 0]
