"""Beams merged into a tree: candidates that share a prefix share its nodes (paper, section 3.2).

    candidates         owners           tree
    Mars is a   red     0 0 0 0        Mars - is - a ------- red
    Mars is red when    0 0 1 1                 |- red ----- when
    Mars is dark red    0 0 2 2                 `- dark ---- red

A beam search yields more than its final candidates: every prefix among the W likeliest of its
length becomes a node, even if no candidate extends it. Such a node uses capacity that merging has
freed, and the target may choose it. The paper verifies only the final candidates: see
`final_candidates`.

All shapes are static, independent of the data, and no operation reads a value on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx


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
    """

    tokens: mx.array
    log_probs: mx.array
    parents: mx.array | None = None

    @property
    def parent_indices(self) -> mx.array:
        """[B, W, L] int32: `parents`, or index w everywhere if it is None."""
        if self.parents is not None:
            return self.parents
        return mx.broadcast_to(mx.arange(self.tokens.shape[1])[None, :, None], self.tokens.shape)


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
        return (self.parents >= 0) | (mx.arange(self.tokens.shape[1])[None] == 0)

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


def _padded(tree: TokenTree, nodes: int) -> TokenTree:
    """Return the tree padded to `nodes` nodes; padding attends to itself alone."""
    more = nodes - tree.tokens.shape[1]
    if not more:
        return tree
    after = [(0, 0), (0, more)]
    itself = mx.eye(nodes, dtype=mx.bool_) & (mx.arange(nodes) >= nodes - more)
    return tree._replace(
        tokens=mx.pad(tree.tokens, after),
        parents=mx.pad(tree.parents, after, constant_values=-1),
        depths=mx.pad(tree.depths, after),
        beams=mx.pad(tree.beams, after),
        mask=mx.pad(tree.mask, [*after, (0, more)]) | itself,
    )


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
    owners = _owners(_lineages(both))
    shared = owners[:, :, None] == owners[:, None]  # [B, W, W, L]
    return both._replace(
        log_probs=mx.max(mx.where(shared, both.log_probs[:, None], -mx.inf), axis=2)
    )


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
    itself = mx.broadcast_to(mx.arange(W)[None, :, None], (B, W, length - L))
    return Beams(
        mx.pad(beams.tokens, after),
        mx.pad(beams.log_probs, after, constant_values=-mx.inf),
        mx.concatenate([beams.parent_indices, itself], axis=2),
    )


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
    index, every = mx.arange(W), mx.ones((B, W), mx.bool_)
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
    lineages = _lineages(beams)
    # Prefixes in depth-major order, m = depth * W + index: a parent comes before its child.
    index, depth = mx.arange(M) % W, mx.arange(M) // W
    scores = _depth_major(beams.log_probs)
    distinct = (_depth_major(_owners(lineages)) == index[None]) & (scores > -mx.inf)
    rank = _best_first(scores, distinct)

    slot = mx.arange(N)
    at_slot = rank[:, None, :] == slot[None, :, None]  # [B, N, M], one True per row
    chosen = mx.sum(mx.where(at_slot, mx.arange(M)[None, None], 0), axis=2)  # [B, N]
    valid = mx.take_along_axis(distinct, chosen, axis=1)

    # Slots of the ancestors of each node, root first: the rank of the owner at each depth.
    flat = lineages.swapaxes(1, 2).reshape(B, M, L)
    lineage = mx.take_along_axis(flat, chosen[:, :, None], axis=1)  # [B, N, L]
    candidates = (mx.arange(L)[None, None] * W + lineage).reshape(B, N * L)
    ancestors = mx.take_along_axis(rank, candidates, axis=1).reshape(B, N, L)
    depths = mx.where(valid, depth[chosen], 0)
    on_path = mx.arange(L)[None, None] <= depths[:, :, None]
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
    node = mx.arange(N)
    return TokenTree(
        tokens=tokens,
        parents=mx.where(log_probs > -mx.inf, node - 1, -1),
        depths=mx.broadcast_to(node, (B, N)),
        beams=mx.zeros((B, N), mx.int32),
        mask=mx.broadcast_to(node[:, None] >= node[None], (B, N, N)),
        max_depth=N - 1,
        is_chain=True,
    )


def _lineages(beams: Beams) -> mx.array:
    """Return the path to each prefix, as the first index of the same tokens at each length.

    Returns:
      [B, W, L, L] int32; [b, w, l, k] is the least v whose prefix of k + 1 tokens starts prefix w
      of l + 1 tokens, for k <= l; 0 for k > l
    """
    B, W, L = beams.tokens.shape
    index = mx.arange(W)
    # Where there is no prefix, use a token that equals no other.
    tokens = mx.where(beams.log_probs > -mx.inf, beams.tokens, -1 - index[None, :, None])
    parents = beams.parent_indices
    path = mx.zeros((B, W, 1), mx.int32)
    paths = [path]
    for level in range(1, L):
        before = mx.take_along_axis(path, parents[:, :, level, None], axis=1)
        token, parent = tokens[:, :, level], before[:, :, -1]
        same = (token[:, :, None] == token[:, None]) & (parent[:, :, None] == parent[:, None])
        first = mx.min(mx.where(same, index, W), axis=2).astype(mx.int32)
        path = mx.concatenate([before, first[:, :, None]], axis=2)
        paths.append(path)
    return mx.stack([mx.pad(p, [(0, 0), (0, 0), (0, L - p.shape[2])]) for p in paths], axis=2)


def _owners(lineages: mx.array) -> mx.array:
    """Return [B, W, L]: for each prefix, the first index that has the same tokens."""
    L = lineages.shape[2]
    last = mx.broadcast_to(mx.arange(L)[None, None, :, None], (*lineages.shape[:3], 1))
    return mx.take_along_axis(lineages, last, axis=3)[..., 0]


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
    index = mx.arange(scores.shape[1])
    mine, other = scores[:, :, None], scores[:, None, :]
    earlier = (index[None, :] < index[:, None])[None]
    better = (other > mine) | ((other == mine) & earlier)
    both = distinct[:, :, None] == distinct[:, None, :]
    ahead = mx.where(both, mx.where(distinct[:, :, None], better, earlier), distinct[:, None, :])
    return mx.sum(ahead.astype(mx.int32), axis=2)
