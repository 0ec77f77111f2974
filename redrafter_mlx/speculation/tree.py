"""Beams merged into a tree: candidates that share a prefix share its nodes (paper, section 3.3).

    candidates         owners           tree
    Mars is a   red     0 0 0 0        Mars - is - a ------- red
    Mars is red when    0 0 1 1                 |- red ----- when
    Mars is dark red    0 0 2 2                 `- dark ---- red

A beam search yields more than its final candidates: every prefix among the W likeliest of its
length becomes a node, even if no candidate extends it. Such a node uses capacity that merging has
freed, and the target may choose it. The paper verifies only the final candidates: see
`bench --prefixes final`.

All shapes are static, independent of the data, and no operation reads a value on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx

from redrafter_mlx.speculation.beams import Beams, lineages, owners
from redrafter_mlx.speculation.constants import iota, is_root


class TokenTree(NamedTuple):
    """Merged beams in a fixed number of nodes, parents before children, padding last.

    Shapes:
      tokens:  [B, N] int32, node 0 is the root
      parents: [B, N] int32, parents[b, i] < i; -1 at the root and at padding
      depths:  [B, N] int32, 0 at the root; undefined at padding
      beams:   [B, N] int32, smallest beam width that contains this node, minus one: the largest
             index of a prefix on its path; undefined at padding
      mask:    [B, N, N] bool, True = node i may attend to node j: j is i or its ancestor

    max_depth: static upper bound of the depths
    is_chain:  static; every node but padding is the child of the node before it, as with one beam
    """

    tokens: mx.array
    parents: mx.array
    depths: mx.array
    beams: mx.array
    mask: mx.array
    max_depth: int
    is_chain: bool

    @property
    def valid(self) -> mx.array:
        """[B, N] bool, False at padding."""
        return (self.parents >= 0) | is_root(self.tokens.shape[1])

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """All fields that have a batch axis."""
        return self[:5]

    def take(self, rows: slice | mx.array) -> TokenTree:
        """Return the trees of some batch rows."""
        return TokenTree._make([*(array[rows] for array in self.arrays), *self[5:]])

    @classmethod
    def joined(cls, trees: Sequence[TokenTree]) -> TokenTree:
        """Join the trees of several batches; the smaller ones are padded."""
        N = max(tree.tokens.shape[1] for tree in trees)
        fields = zip(*(_padded(tree, N).arrays for tree in trees), strict=True)
        max_depth, is_chain = max(t.max_depth for t in trees), all(t.is_chain for t in trees)
        return cls._make([*(mx.concatenate(list(f)) for f in fields), max_depth, is_chain])


Pack = Callable[[Beams, int], TokenTree]
"""Makes a tree of beams and the node capacity N, as `pack_beam` does."""


def _padded(tree: TokenTree, nodes: int) -> TokenTree:
    """Return the tree padded to `nodes` nodes; padding attends to itself alone."""
    more = nodes - tree.tokens.shape[1]
    if not more:
        return tree
    after = [(0, 0), (0, more)]
    itself = mx.eye(nodes, dtype=mx.bool_) & (iota(nodes) >= nodes - more)
    return tree._replace(
        tokens=mx.pad(tree.tokens, after),
        parents=mx.pad(tree.parents, after, constant_values=-1),
        depths=mx.pad(tree.depths, after),
        beams=mx.pad(tree.beams, after),
        mask=mx.pad(tree.mask, [*after, (0, more)]) | itself,
    )


def pack_beam(beams: Beams, max_nodes: int) -> TokenTree:
    """Merge shared prefixes and keep the `max_nodes` likeliest nodes; see `pack_with_sources`."""
    return pack_with_sources(beams, max_nodes)[0]


def pack_with_sources(beams: Beams, max_nodes: int) -> tuple[TokenTree, mx.array]:
    """Return the packed tree, likeliest nodes first, and the prefix that each node came from.

    A parent is never less likely than its child and wins ties, so the likeliest nodes form a tree.
    A prefix with log-probability -inf does not become a node.

    Args:
      max_nodes: N, the node capacity; unused nodes are padding, which no valid node attends to and
                 which is never accepted
    Returns:
      sources: [B, N] int32, the prefix that each node came from, as depth * W + index
    """
    B, W, L = beams.tokens.shape
    if W == 1:
        tree = _chain(beams.tokens[:, 0, :max_nodes], beams.log_probs[:, 0, :max_nodes])
        return tree, tree.depths
    M, N = W * L, min(max_nodes, W * (L - 1) + 1)
    paths = lineages(beams)
    # Prefixes in depth-major order, m = depth * W + index: a parent comes before its child.
    index, depth = iota(M) % W, iota(M) // W
    scores = _depth_major(beams.log_probs)
    own = (depth > 0) | (index == 0)  # all share the root
    if not beams.distinct:
        own = _depth_major(owners(paths)) == index
    kept = own & (scores > -mx.inf)
    rank = _best_first(scores, kept)

    slot = iota(N)
    at_slot = rank[:, None, :] == slot[None, :, None]  # [B, N, M], one True per row
    chosen = mx.sum(mx.where(at_slot, iota(M)[None, None], 0), axis=2)  # [B, N]
    valid = mx.take_along_axis(kept, chosen, axis=1)

    # Slots of the ancestors of each node, root first: the rank of the owner at each depth.
    flat = paths.swapaxes(1, 2).reshape(B, M, L)
    lineage = mx.take_along_axis(flat, chosen[:, :, None], axis=1)  # [B, N, L]
    candidates = (iota(L)[None, None] * W + lineage).reshape(B, N * L)
    ancestors = mx.take_along_axis(rank, candidates, axis=1).reshape(B, N, L)
    depths = mx.where(valid, depth[chosen], 0)
    on_path = iota(L)[None, None] <= depths[:, :, None]
    reaches = (ancestors[:, :, :, None] == slot) & on_path[:, :, :, None]  # [B, N, L, N]
    itself = (slot[:, None] == slot)[None]
    mask = mx.where(valid[:, :, None], mx.any(reaches, axis=2), itself)

    above = mx.maximum(depths - 1, 0)[:, :, None]
    parent = mx.take_along_axis(ancestors, above, axis=2)[:, :, 0]
    tree = TokenTree(
        tokens=mx.take_along_axis(_depth_major(beams.tokens), chosen, axis=1),
        parents=mx.where(valid & (depths > 0), parent, -1),
        depths=depths,
        beams=mx.max(mx.where(on_path, lineage, 0), axis=2),
        mask=mask,
        max_depth=min(L, N) - 1,
        is_chain=False,
    )
    return tree, chosen


def _chain(tokens: mx.array, log_probs: mx.array) -> TokenTree:
    """Return one candidate [B, N] as a tree without branches."""
    B, N = tokens.shape
    node = iota(N)
    return TokenTree(
        tokens=tokens,
        parents=mx.where(log_probs > -mx.inf, node - 1, -1),
        depths=mx.broadcast_to(node, (B, N)),
        beams=mx.zeros((B, N), mx.int32),
        mask=mx.broadcast_to(node[:, None] >= node[None], (B, N, N)),
        max_depth=N - 1,
        is_chain=True,
    )


def _depth_major(x: mx.array) -> mx.array:
    """Reorder [B, W, L] to [B, L * W]."""
    return x.swapaxes(1, 2).reshape(x.shape[0], -1)


def _best_first(scores: mx.array, distinct: mx.array) -> mx.array:
    """Return the rank of every prefix: distinct ones first, then by score, then by index.

    Counts the prefixes ahead of each one instead of sorting: exact on ties, on every backend.

    Shapes:
      scores:   [B, M] float32
      distinct: [B, M] bool
    Returns:
      rank:     [B, M] int32, a permutation of 0..M-1
    """
    index = iota(scores.shape[1])
    mine, other = scores[:, :, None], scores[:, None, :]
    earlier = (index[None, :] < index[:, None])[None]
    better = (other > mine) | ((other == mine) & earlier)
    both = distinct[:, :, None] == distinct[:, None, :]
    ahead = mx.where(both, mx.where(distinct[:, :, None], better, earlier), distinct[:, None, :])
    return mx.sum(ahead.astype(mx.int32), axis=2)
