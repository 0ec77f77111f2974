"""Packing without merging, as a baseline for merging: each candidate has its own nodes.

candidates         merged                    separate
Mars is a   red    Mars - is - a --- red     Mars -+- is - a ---- red
Mars is red when         `- red - when             `- is - red -- when
"""

from __future__ import annotations

import mlx.core as mx

from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.speculation.constants import iota
from redrafter_mlx.speculation.tree import TokenTree


def pack_separately(beams: Beams) -> TokenTree:
    """Pack each candidate of full length as a separate branch from the shared root.

    Siblings may have the same token here. If several paths are accepted, their tokens are the same,
    so the text is that of the merged tree.

    Returns:
      a tree of N = W (L - 1) + 1 nodes; nodes after the end of a candidate are padding
    """
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
