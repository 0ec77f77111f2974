"""Token recycling (arXiv 2408.08696): drafts from the successors that were likely before.

Every verified node shows the target's likeliest next tokens after it, those of rejected drafts too.
A table keeps them by the node's last two tokens, and by the last one alone. Drafts are found in it
level by level: no network is called and nothing is trained.

    verified     the -+- cat    after `the cat`: sat, is, ran
                      `- dog    after `the dog`: barks, is, ran
    text later   ... and the dog    -> drafts barks, is, ran; after each, what followed it before
"""

from __future__ import annotations

import math
from typing import cast

import mlx.core as mx

from redrafter_mlx.config import BeamShape
from redrafter_mlx.drafting.interface import Drafter, Features, Memory, Seen
from redrafter_mlx.speculation.beam_search import top_k
from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.speculation.constants import iota, is_root
from redrafter_mlx.speculation.sampling import Draws

_K = 8
"""Number of successors that are kept for each context."""

_ROWS = 1 << 15
"""Number of contexts in a table, 2.2 MB; newer ones replace those with the same hash."""

_DISCOUNTS = math.log(0.75), math.log(0.5)
"""What is added to the log-probability of a successor after two equal tokens, or one: the rest of
the text differs from that of the earlier place."""

_FOLLOWED = math.log(0.5)
"""Log-probability of the token that followed in the prompt, which the target has not rated."""


class Recycling(Drafter, well_formed=True):
    """Drafts from a table of successors.

    Its memory:
      rows: [B, R + 1, 1 + 2 K] int32, of each context its key, its successors, and the bits of
            their log-probabilities, the likeliest first; the last row is for what is not kept
      last: [B] int32, the token before the root; -1 at the start of a text
    """

    name = "recycling"
    level_cost = 0.02
    timing_key = "recycling"
    max_width = _K
    features = Features(every_position=True, successors=_K)

    def empty(self, batch: int) -> Memory:
        return mx.zeros((batch, _ROWS + 1, 1 + 2 * _K), mx.int32), mx.full((batch,), -1, mx.int32)

    def extend(self, memory: Memory, seen: Seen) -> Memory:
        """Keep the successors at the verified nodes, or in a prompt those tokens that followed."""
        rows, last = cast("tuple[mx.array, mx.array]", memory)
        if seen.verified is not None:
            tokens, parents, successors, log_probs = seen.verified
            above = mx.take_along_axis(tokens, mx.maximum(parents, 0), axis=1)
            before = mx.where(parents < 0, last[:, None], above)
            kept = (parents >= 0) | is_root(tokens.shape[1])
            rows = _put(rows, before, tokens, successors, log_probs, kept)
        else:
            tokens, following = seen.tokens[:, :-1], seen.tokens[:, 1:, None]
            before = mx.concatenate([last[:, None], tokens[:, :-1]], axis=1)
            kept = iota(tokens.shape[1])[None] < seen.count[:, None]
            successors = mx.pad(following, [(0, 0), (0, 0), (0, _K - 1)])
            log_probs = mx.where(iota(_K) == 0, _FOLLOWED, -mx.inf)
            log_probs = mx.broadcast_to(log_probs, successors.shape)
            rows = _put(rows, before, tokens, successors, log_probs, kept)
        return rows, _before_root(seen)

    def draft(self, memory: Memory, seen: Seen, shape: BeamShape) -> tuple[Beams, Memory]:
        rows, last = cast("tuple[mx.array, mx.array]", self.extend(memory, seen))
        return _search(rows, last, seen.root, self.drafted(shape), seen.draws), (rows, last)


def _before_root(seen: Seen) -> mx.array:
    at = mx.maximum(seen.count - 1, 0)[:, None]
    return mx.take_along_axis(seen.tokens, at, axis=1)[:, 0]


def _search(
    rows: mx.array, before: mx.array, root: mx.array, shape: BeamShape, draws: Draws | None
) -> Beams:
    """Return the W likeliest prefixes of each length, by the table."""
    B, W = root.shape[0], shape.width
    tokens = [mx.broadcast_to(root[:, None], (B, W))]
    scores, parents = [mx.zeros((B, W))], [mx.zeros((B, W), mx.int32)]
    before, last, above = before[:, None], root[:, None], scores[0][:, :1]
    for level in range(shape.length - 1):
        found, log_probs = _successors(rows, before, last)  # [B, X, K]
        if draws is not None:
            log_probs = _with_noise(log_probs, found, draws, level)
        total = (above[:, :, None] + log_probs).reshape(B, -1)
        above, index = top_k(total, W)
        origin = index // _K
        before = mx.take_along_axis(last, origin, axis=1)
        last = mx.take_along_axis(found.reshape(B, -1), index, axis=1)
        tokens.append(last)
        scores.append(above)
        parents.append(origin)
    return Beams(
        mx.stack(tokens, axis=2), mx.stack(scores, axis=2), mx.stack(parents, axis=2), True
    )


def _successors(rows: mx.array, before: mx.array, last: mx.array) -> tuple[mx.array, mx.array]:
    """Return successors and log-probabilities [B, X, K] after the tokens [B, X]; -inf without."""
    (of_two, two), (of_one, one) = _places(before, last)
    both = _at(rows, mx.concatenate([of_two, of_one], axis=1))  # [B, 2 X, 1 + 2 K]
    X = last.shape[1]
    long, short = both[:, :X], both[:, X:]
    fits_two, fits_one = long[..., :1] == two[..., None], short[..., :1] == one[..., None]
    chosen = mx.where(fits_two, long, short)
    discount = mx.where(fits_two, _DISCOUNTS[0], mx.where(fits_one, _DISCOUNTS[1], -mx.inf))
    return chosen[..., 1 : 1 + _K], chosen[..., 1 + _K :].view(mx.float32) + discount


def _with_noise(log_probs: mx.array, tokens: mx.array, draws: Draws, level: int) -> mx.array:
    """Return the log-probabilities given the noise that the target will draw with."""
    noise, shape = draws.noise[:, level], tokens.shape
    at = mx.take_along_axis(noise, tokens.reshape(shape[0], -1), axis=1).reshape(shape)
    drawn = log_probs / draws.temperature[:, None, None] + at
    most = mx.logsumexp(mx.maximum(drawn, -1e9), axis=-1, keepdims=True)
    return drawn - most + _DISCOUNTS[0]


def _put(
    rows: mx.array,
    before: mx.array,
    tokens: mx.array,
    successors: mx.array,
    log_probs: mx.array,
    kept: mx.array,
) -> mx.array:
    """Return the table with the successors after contexts [B, M], where `kept`."""
    values = mx.concatenate([successors, log_probs.view(mx.int32)], axis=2)
    places, entries = [], []
    for place, key in _places(before, tokens):
        places.append(mx.where(kept, place, _ROWS))
        entries.append(mx.concatenate([key[..., None], values], axis=2))
    index, entry = mx.concatenate(places, axis=1), mx.concatenate(entries, axis=1)
    index = mx.broadcast_to(index[..., None], entry.shape)
    return mx.put_along_axis(rows, index, entry, axis=1)


def _at(rows: mx.array, places: mx.array) -> mx.array:
    return mx.take_along_axis(rows, places[..., None], axis=1)


def _places(before: mx.array, last: mx.array) -> list[tuple[mx.array, mx.array]]:
    """Return row and key [B, M] of the contexts of two tokens, and of one."""
    found = []
    for first in (before, mx.full(last.shape, -2, mx.int32)):
        key = first.astype(mx.uint32) * 0x9E3779B1 + last.astype(mx.uint32) * 0x85EBCA6B
        key = (key ^ (key >> 15)) * 0x2C1B3C6D
        found.append(((key >> 16) % _ROWS, (key >> 1 | 1).astype(mx.int32)))
    return found
