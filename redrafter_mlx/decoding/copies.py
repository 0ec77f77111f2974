"""Prompt-lookup copies in the tree: instead of the drafter's branches, or next to them.

The drafter works on the device while the host reads what was accepted. The copies that prompt
lookup finds then join the tree, before its verification is submitted. Copies depend on nothing but
the text so far, so every acceptance method stays exact. A copy has draft probability 1: rejection
would accept it with the target's own probability and otherwise draw another token, which together
is one draw from the target. So a tree of copies is accepted like any other (`accept.accept`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx

from redrafter_mlx.config import BeamShape
from redrafter_mlx.drafting.continuation import Continuation
from redrafter_mlx.speculation.beams import Beams, join_beams, likelier_candidate
from redrafter_mlx.speculation.tree import TokenTree, pack_beam, pack_with_sources


def copy_beams(
    copies: Sequence[Sequence[Continuation]], roots: Sequence[int], shape: BeamShape
) -> Beams:
    """Return each batch row's copies as beams [B, W, L]; missing ones have log-probability -inf."""
    W, L = max(map(len, copies)), shape.length
    nothing = Continuation((0,) * (L - 1), (-math.inf,) * (L - 1))
    full = [[_padded(copy, L - 1) for copy in row] + [nothing] * (W - len(row)) for row in copies]
    pairs = zip(roots, full, strict=True)
    tokens = [[[root, *copy.tokens] for copy in row] for root, row in pairs]
    scores = [[[0.0, *copy.log_probs] for copy in row] for row in full]
    return Beams(mx.array(tokens, mx.int32), mx.array(scores, mx.float32))


def tree_of_copies(
    copies: Beams, shape: BeamShape, drafted: Beams | None
) -> tuple[TokenTree, mx.array]:
    """Return the tree of the copies, joined with the drafter's beams [B, W, L] if there are any.

    A tree with one beam holds only the candidate with more expected accepted drafts.

    Returns:
      from_host: [B, N] bool, the nodes that the drafter does not propose; undefined at padding
    """
    if drafted is None:
        tree = pack_beam(copies, shape.nodes)
        return tree, mx.ones(tree.tokens.shape, mx.bool_)
    if shape.width > 1:
        both = join_beams(drafted, copies)
        tree, sources = pack_with_sources(both, shape.nodes)
        return tree, sources % both.tokens.shape[1] >= drafted.tokens.shape[1]
    first = Beams(copies.tokens[:, :1], copies.log_probs[:, :1])
    tree = pack_beam(likelier_candidate(drafted, first), shape.nodes)
    N = tree.tokens.shape[1]
    tokens, scores = drafted.tokens[:, 0, :N], drafted.log_probs[:, 0, :N]
    same = (tree.tokens[:, : tokens.shape[1]] == tokens) & (scores > -math.inf)
    shared = mx.cumprod(same.astype(mx.int32), axis=1)
    return tree, mx.pad(shared, [(0, 0), (0, N - tokens.shape[1])]) == 0


def _padded(copy: Continuation, drafts: int) -> Continuation:
    """Return the copy with exactly `drafts` tokens, cut or padded."""
    missing = drafts - len(copy.tokens)
    return Continuation(
        copy.tokens[:drafts] + (0,) * missing, copy.log_probs[:drafts] + (-math.inf,) * missing
    )
