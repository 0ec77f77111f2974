"""Continuations from the host in the tree: instead of the drafter's branches, or beside them.

The drafter works on the device while the host reads what was accepted. The continuations that the
host then finds join the tree, before its verification is submitted. They depend on nothing but the
text so far, so every acceptance method stays exact. Each has draft probability 1: rejection would
accept it with the target's own probability and otherwise draw another token, which together is one
draw from the target. So a tree of them is accepted like any other (`accept.accept`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import TypeVar

import mlx.core as mx

from redrafter_mlx.config import BeamShape
from redrafter_mlx.decoding.proposal import Drafted, Proposal
from redrafter_mlx.decoding.state import Drafts
from redrafter_mlx.drafting.untrained.continuation import Continuation
from redrafter_mlx.speculation.beams import Beams, join_beams, likelier_candidate
from redrafter_mlx.speculation.tree import TokenTree, pack_beam, pack_with_sources

_N = TypeVar("_N", int, float)


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
