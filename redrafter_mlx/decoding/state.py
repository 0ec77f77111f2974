"""The state that passes from step to step, and continuations from the host that join its trees.

The drafter works on the device while the host reads what was accepted. The continuations that the
host then finds join the tree, or replace the drafter's branches, before its verification is
submitted. They depend on nothing but the text so far, so every acceptance method stays exact. Each
has draft probability 1: rejection would accept it with the target's own probability and otherwise
draw another token, which together is one draw from the target. So a tree of them is accepted like
any other (`accept.accept`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, TypeVar

import mlx.core as mx

from redrafter_mlx.config import PLAIN, BeamShape, SamplingParams
from redrafter_mlx.decoding.cache.sequence_cache import SequenceCache
from redrafter_mlx.decoding.sequence import Drafted, Proposal
from redrafter_mlx.drafting.interface import Drafter
from redrafter_mlx.drafting.untrained.continuation import Continuation
from redrafter_mlx.speculation.beams import Beams, join_beams, likelier_candidate
from redrafter_mlx.speculation.sampling import Past
from redrafter_mlx.speculation.tree import TokenTree, pack_beam, pack_with_sources

_T = TypeVar("_T")
_N = TypeVar("_N", int, float)


class Drafts(NamedTuple):
    """The trees of a batch and, for rejection, the distributions they were drawn from.

    drafted:   how the drafts of each sequence were made
    log_probs: [B, N, V], the distribution of each node's children, undefined in rows that were not
               drawn; None if no row was
    beams:     what the trees were packed from, so that continuations can join; None if nothing was
               drafted
    from_host: [B, N] bool, the nodes that only a continuation from the host proposes, undefined at
               padding; None if the trees hold none
    noise:     [B, L, V], what `sample` will draw with, if it was drawn for the drafter; else None
    """

    tree: TokenTree
    drafted: tuple[Drafted, ...]
    log_probs: mx.array | None = None
    beams: Beams | None = None
    from_host: mx.array | None = None
    noise: mx.array | None = None

    @classmethod
    def plain(cls, root: mx.array) -> Drafts:
        """Return trees that hold only their roots [B]."""
        tokens = root[:, None, None]
        tree = pack_beam(Beams(tokens, mx.zeros(tokens.shape)), 1)
        return cls(tree, (Drafted(PLAIN),) * root.shape[0])

    @property
    def are_roots(self) -> bool:
        """Whether no sequence has a draft."""
        return self.tree.tokens.shape[1] == 1

    @property
    def usual_size(self) -> bool:
        """Whether many steps have trees of this size, which continuations and batches have not."""
        return self.from_host is None and len(self.drafted) == 1

    def take(self, rows: Sequence[int]) -> Drafts:
        """Return the drafts of some batch rows."""
        if len(rows) == len(self.drafted):
            return self
        index = mx.array(list(rows))
        return Drafts(
            self.tree.take(index),
            _of(rows, self.drafted),
            None if self.log_probs is None else self.log_probs[index],
            None if self.beams is None else self.beams.take(index),
            None if self.from_host is None else self.from_host[index],
            None if self.noise is None else self.noise[index],
        )

    @classmethod
    def joined(cls, parts: Sequence[Drafts]) -> Drafts:
        """Join the drafts of several batches, padded to the size of the largest tree.

        No continuations can join the result: its beams are not kept. Nor is the noise, which is
        drawn again.
        """
        if len(parts) == 1:
            return parts[0]
        tree = TokenTree.joined([part.tree for part in parts])
        N = tree.tokens.shape[1]
        log_probs = _padded([part.log_probs for part in parts], parts, N)
        from_host = _padded([part.from_host for part in parts], parts, N)
        return cls(tree, sum((p.drafted for p in parts), ()), log_probs, from_host=from_host)


@dataclass
class DecodeState:
    """All state that a batch of sequences carries from step to step.

    Shapes:
      length:   [B] int32, number of committed positions
      drafts:   the trees to verify next; their roots are the last tokens emitted
      keys:     [B, 2] uint32, see sampling
      sampling: of each sequence, how its tokens are chosen
      logprobs: of each sequence, whether its results hold the log-probabilities of its tokens
      history:  of each sequence, the tokens before the root that penalties use; None without them
    """

    cache: SequenceCache
    length: mx.array
    drafts: Drafts
    keys: mx.array
    sampling: tuple[SamplingParams, ...]
    logprobs: tuple[bool, ...]
    history: tuple[Past | None, ...]

    def take(self, rows: Sequence[int], slots: int, drafter: Drafter | None) -> DecodeState:
        """Return some of the batch rows; the cache is a copy unless all are taken.

        slots, drafter: as in `SequenceCache.take`
        """
        if list(rows) == list(range(len(self.sampling))):
            return self
        index = mx.array(list(rows))
        return DecodeState(
            self.cache.take(rows, slots, drafter),
            self.length[index],
            self.drafts.take(rows),
            self.keys[index],
            _of(rows, self.sampling),
            _of(rows, self.logprobs),
            _of(rows, self.history),
        )

    @classmethod
    def joined(cls, states: Sequence[DecodeState]) -> DecodeState:
        """Join several states into one batch; their drafters must have caught up."""
        if len(states) == 1:
            return states[0]
        return cls(
            SequenceCache.joined([state.cache for state in states]),
            mx.concatenate([state.length for state in states]),
            Drafts.joined([state.drafts for state in states]),
            mx.concatenate([state.keys for state in states]),
            sum((state.sampling for state in states), ()),
            sum((state.logprobs for state in states), ()),
            sum((state.history for state in states), ()),
        )


def _of(rows: Sequence[int], each: tuple[_T, ...]) -> tuple[_T, ...]:
    return tuple(each[b] for b in rows)


def _padded(
    arrays: Sequence[mx.array | None], parts: Sequence[Drafts], nodes: int
) -> mx.array | None:
    """Join arrays [B, N, ...] of several drafts; zeros replace missing ones, None if all are."""
    known = next((array for array in arrays if array is not None), None)
    if known is None:
        return None
    filled = []
    for array, part in zip(arrays, parts, strict=True):
        if array is None:
            filled.append(mx.zeros((len(part.drafted), nodes, *known.shape[2:]), known.dtype))
        else:
            tail = [(0, 0)] * (array.ndim - 2)
            filled.append(mx.pad(array, [(0, 0), (0, nodes - array.shape[1]), *tail]))
    return mx.concatenate(filled)


def revised(drafts: Drafts, proposals: Sequence[Proposal | None], roots: Sequence[int]) -> Drafts:
    """Return drafts in which continuations replace or join what was drafted.

    proposals: one per sequence, None to leave it as it is
    roots:     the last token of each sequence
    """
    parts = []
    # Sequences that stay as they are stay together: each part takes some thirty operations.
    for at, rows in groupby(range(len(proposals)), lambda b: b if proposals[b] else None):
        part, proposal = drafts.take([*rows]), None if at is None else proposals[at]
        if at is not None and proposal is not None:
            found = continuation_beams([proposal.continuations], [roots[at]], proposal.shape)
            beside = part.beams if proposal.join else None
            tree, from_host = continuation_tree(found, proposal.shape, beside)
            made = Drafted(proposal.shape, from_host=True)
            part = Drafts(tree, (made,), from_host=from_host)
        parts.append(part)
    return Drafts.joined(parts)


def continuation_beams(
    found: Sequence[Sequence[Continuation]], roots: Sequence[int], shape: BeamShape
) -> Beams:
    """Return each sequence's continuations as beams [B, W, L]; missing ones have score -inf."""
    W, L = max(map(len, found)), shape.length
    tokens, scores = [], []
    for root, row in zip(roots, found, strict=True):
        nothing: list[tuple[Sequence[int], Sequence[float]]] = [((), ())] * (W - len(row))
        each = [(one.tokens, one.log_probs) for one in row] + nothing
        tokens.append([[root, *_cut(drafts, L - 1, 0)] for drafts, _ in each])
        scores.append([[0.0, *_cut(probs, L - 1, -math.inf)] for _, probs in each])
    return Beams(mx.array(tokens, mx.int32), mx.array(scores, mx.float32))


def continuation_tree(
    found: Beams, shape: BeamShape, drafted: Beams | None
) -> tuple[TokenTree, mx.array]:
    """Return the tree of continuations, joined with the drafter's beams [B, W, L] if there are any.

    A tree with one beam holds only the candidate with more expected accepted drafts.

    Returns:
      from_host: [B, N] bool, the nodes that the drafter does not propose; undefined at padding
    """
    if drafted is None:
        tree = pack_beam(found, shape.nodes)
        return tree, mx.ones(tree.tokens.shape, mx.bool_)
    if shape.width > 1:
        both = join_beams(drafted, found)
        tree, sources = pack_with_sources(both, shape.nodes)
        return tree, sources % both.tokens.shape[1] >= drafted.tokens.shape[1]
    first = Beams(found.tokens[:, :1], found.log_probs[:, :1])
    tree = pack_beam(likelier_candidate(drafted, first), shape.nodes)
    N = tree.tokens.shape[1]
    tokens, scores = drafted.tokens[:, 0, :N], drafted.log_probs[:, 0, :N]
    same = (tree.tokens[:, : tokens.shape[1]] == tokens) & (scores > -math.inf)
    shared = mx.cumprod(same.astype(mx.int32), axis=1)
    return tree, mx.pad(shared, [(0, 0), (0, N - tokens.shape[1])]) == 0


def _cut(values: Sequence[_N], count: int, padding: _N) -> list[_N]:
    """Return exactly `count` values, cut or padded."""
    return list(values[:count]) + [padding] * (count - len(values))
