"""The packings of trees that papers measure: of the final candidates, merged and not.

candidates         merged                    separate
Mars is a   red    Mars - is - a --- red     Mars -+- is - a ---- red
Mars is red when         `- red - when             `- is - red -- when
"""

from __future__ import annotations

from typing import Literal

import mlx.core as mx

from redrafter_mlx.config import GenerationOptions
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.speculation.constants import iota
from redrafter_mlx.speculation.tree import Pack, TokenTree, pack_beam

Prefixes = Literal["all", "final", "separate"]
"""Which prefixes of a beam search are verified: "all", as in every answer; "final", as in the
paper: those of its final candidates; "separate": its final candidates without merging, each with
its own prefixes."""


def check_prefixes(prefixes: Prefixes, options: GenerationOptions) -> None:
    """Raise BadInputError for options that other packings than "all" exclude."""
    if prefixes == "all":
        return
    if options.method == "rejection":
        raise BadInputError(
            f"prefixes is {prefixes!r}, and accept 'rejection', which draws a tree of its own; "
            f"choose 'sample'"
        )
    if prefixes == "separate" and options.max_nodes is not None:
        raise BadInputError("prefixes is 'separate', which leaves no node out; leave out max_nodes")
    if options.automatic:
        raise BadInputError(
            f"prefixes is {prefixes!r}, which needs a fixed shape; give beam_width and beam_length"
        )


def pack_final(beams: Beams, max_nodes: int) -> TokenTree:
    """Merge the shared prefixes of the final candidates, as the paper does."""
    return pack_beam(final_candidates(beams), max_nodes)


def final_candidates(beams: Beams) -> Beams:
    """Keep only the prefixes of candidates of full length, as in the paper.

        search, W = 2            all its prefixes           of the final candidates
        length 2    length 3
        is          is a         root -+- is -+- a          root --- is -+- a
        red         is dark            |      `- dark                    `- dark
                                       `- red

    `red` was among the two likeliest of its length, but no candidate extends it. The number of
    nodes after merging these beams depends on the data; with every prefix it is W (L - 1) + 1 at
    each step. A candidate that ended early is treated as one of full length if it is its own parent
    at the later lengths.

    Returns:
      the same tokens and parents; log_probs is -inf for all other prefixes
    """
    B, W, L = beams.tokens.shape
    index, every = iota(W), mx.ones((B, W), mx.bool_)
    extended = every  # [B, W], which prefixes of a length belong to a final candidate
    levels = [extended]
    for level in range(L - 1, 1, -1):
        is_parent = beams.parent_indices[:, :, level, None] == index  # [B, W, W]
        extended = mx.any(is_parent & extended[:, :, None], axis=1)
        levels.append(extended)
    if L > 1:
        levels.append(every)  # the root
    of_final = mx.stack(levels[::-1], axis=2)
    return beams._replace(log_probs=mx.where(of_final, beams.log_probs, -mx.inf))


def pack_separately(beams: Beams, max_nodes: int) -> TokenTree:
    """Pack each candidate of full length as a separate branch from the shared root.

    Siblings may have the same token here. If several paths are accepted, their tokens are the same,
    so the text is that of the merged tree. It has N = W (L - 1) + 1 nodes, the padding last.
    """
    del max_nodes  # none is left out
    B, W, L = beams.tokens.shape
    D, N = L - 1, W * (L - 1) + 1
    tokens, live = _candidates(beams)
    node = iota(N)
    branch, depth = (node - 1) // max(D, 1), mx.where(node > 0, (node - 1) % max(D, 1) + 1, 0)
    root = beams.tokens[:, 0, :1]
    flat = mx.concatenate([root, tokens.reshape(B, -1)], axis=1)  # [B, N]
    valid = mx.concatenate([mx.ones((B, 1), mx.bool_), live.reshape(B, -1)], axis=1)
    same = (branch[:, None] == branch[None]) & (node[None] > 0)
    reaches = (same & (depth[None] <= depth[:, None])) | (node[None] == 0)  # [N, N]

    order = mx.argsort(mx.where(valid, node, node + N), axis=1)  # padding last
    rank = mx.argsort(order, axis=1)
    valid = mx.take_along_axis(valid, order, axis=1)
    before = mx.where(depth > 1, node - 1, 0)[order]  # [B, N], the parent's index before reordering
    parents = mx.take_along_axis(rank, before, axis=1).astype(mx.int32)
    depths = depth[order].astype(mx.int32)
    ancestors = mx.take_along_axis(
        reaches[order], mx.broadcast_to(order[:, None], (B, N, N)), axis=2
    )
    itself = (node[:, None] == node[None])[None]
    return TokenTree(
        tokens=mx.take_along_axis(flat, order, axis=1),
        parents=mx.where(valid & (depths > 0), parents, -1),
        depths=depths,
        beams=mx.where(depths > 0, branch[order], 0).astype(mx.int32),
        mask=mx.where(valid[:, :, None], ancestors, itself),
        max_depth=D,
        is_chain=False,
    )


def _candidates(beams: Beams) -> tuple[mx.array, mx.array]:
    """Return the drafts of each candidate and whether each exists: [B, W, L - 1] twice."""
    B, W, L = beams.tokens.shape
    index = mx.broadcast_to(iota(W)[None], (B, W))
    tokens, scores = [], []
    for level in range(L - 1, 0, -1):
        tokens.append(mx.take_along_axis(beams.tokens[:, :, level], index, axis=1))
        scores.append(mx.take_along_axis(beams.log_probs[:, :, level], index, axis=1))
        index = mx.take_along_axis(beams.parent_indices[:, :, level], index, axis=1)
    if not tokens:
        return mx.zeros((B, W, 0), mx.int32), mx.zeros((B, W, 0), mx.bool_)
    there = mx.stack(scores[::-1], axis=2) > -mx.inf
    return mx.stack(tokens[::-1], axis=2), mx.cumprod(there.astype(mx.int32), axis=2) > 0


PACKINGS: dict[Prefixes, Pack] = {
    "all": pack_beam,
    "final": pack_final,
    "separate": pack_separately,
}
"""How the prefixes of each choice become a tree."""
