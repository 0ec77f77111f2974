"""Which drafts are accepted.

`accept` walks from the root along the target's own choices. After every node the target chooses one
token, and a child with that token is accepted. The path ends at the first node that has no such
child, and that node's choice is the bonus token. Each emitted token is therefore the target's own
choice given the tokens before it, for any drafts: this is lossless, for the argmax and for draws.

`accept_typical` accepts drafts that are likely enough, which changes the distribution. Rejection
sampling is in `rejection.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from redrafter_mlx.speculation.constants import iota, is_root
from redrafter_mlx.speculation.tree import TokenTree


class Acceptance(NamedTuple):
    """The outcome of one verification.

    Shapes:
      path:       [B, L] int32 nodes, root first; 0 after the accepted nodes
      n_accepted: [B] int32, drafts accepted (the root not counted)
      last:       [B] int32, the deepest accepted node
      emitted:    [B, L] int32, the tokens after the root: the accepted drafts and, at index
                  n_accepted, the bonus token; undefined after that
      bonus:      [B] int32, the target's choice at the deepest accepted node
    """

    path: mx.array
    n_accepted: mx.array
    last: mx.array
    emitted: mx.array
    bonus: mx.array


def accept(tree: TokenTree, choices: mx.array) -> Acceptance:
    """Accept the path from the root along the target's choices.

    Siblings have different tokens, so at most one child of a node is right, and the accepted nodes
    form one path.

    Shapes:
      choices: [B, N] int32, the target's token after each node
    """
    if tree.is_chain:
        return _accept_chain(tree, choices)
    chosen = mx.take_along_axis(choices, mx.maximum(tree.parents, 0), axis=1)
    accepted = _with_ancestors(tree, tree.tokens == chosen)
    last = mx.argmax(mx.where(accepted, tree.depths, -1), axis=1)
    bonus = mx.take_along_axis(choices, last[:, None], axis=1)[:, 0]
    return up_to(tree, last, bonus)


def accept_typical(
    tree: TokenTree, log_probs: mx.array, choices: mx.array, epsilon: float, delta: float
) -> Acceptance:
    """Accept the longest path of drafts x with p(x) > min(epsilon, delta * exp(-H(p))).

    Typical acceptance (Medusa, arXiv 2401.10774, section 2.3.1), with H the entropy in nats. It
    changes the distribution of the output. Ties go to the path that the drafter scored as likelier.

    Shapes:
      log_probs: [B, N, V], the target's distribution after each node
      choices:   [B, N] int32, the target's draw after each node, for the bonus token
    """
    B, N, V = log_probs.shape
    probs = mx.exp(log_probs)
    terms = mx.where(probs > 0, probs * log_probs, 0.0)  # their sum is -H
    threshold = mx.minimum(epsilon, delta * mx.exp(mx.sum(terms, axis=-1)))  # [B, N]
    parent = mx.maximum(tree.parents, 0)
    p = mx.take_along_axis(probs.reshape(B, N * V), parent * V + tree.tokens, axis=1)
    right = p > mx.take_along_axis(threshold, parent, axis=1)
    accepted = _with_ancestors(tree, right)
    last = mx.argmax(mx.where(accepted, tree.depths * N + N - 1 - iota(N), -1), axis=1)
    bonus = mx.take_along_axis(choices, last[:, None], axis=1)[:, 0]
    return up_to(tree, last, bonus)


def up_to(tree: TokenTree, last: mx.array, bonus: mx.array) -> Acceptance:
    """Return the acceptance of the path to node `last` [B], with bonus token `bonus` [B]."""
    N = tree.tokens.shape[1]
    last = last.astype(mx.int32)
    n_accepted = mx.take_along_axis(tree.depths, last[:, None], axis=1)
    on_path = mx.take_along_axis(tree.mask, last[:, None, None], axis=1)  # [B, 1, N]
    level = iota(tree.max_depth + 1)
    here = on_path & (tree.depths[:, None, :] == level[None, :, None])  # [B, L, N]
    path = mx.sum(mx.where(here, iota(N)[None, None], 0), axis=2)
    following = mx.concatenate([path[:, 1:], path[:, :1]], axis=1)
    drafts = mx.take_along_axis(tree.tokens, following, axis=1)
    return Acceptance(
        path=path,
        n_accepted=n_accepted[:, 0],
        last=last,
        emitted=mx.where(level[None] < n_accepted, drafts, bonus[:, None]),
        bonus=bonus,
    )


def _accept_chain(tree: TokenTree, choices: mx.array) -> Acceptance:
    """`accept` for a chain: accept the drafts before the first that was not chosen."""
    B, N = tree.tokens.shape
    if N == 1:  # a plain step
        nothing = mx.zeros((B,), mx.int32)
        return Acceptance(nothing[:, None], nothing, nothing, choices, choices[:, 0])
    node = iota(N)[None]
    right = (tree.tokens[:, 1:] == choices[:, :-1]) & (tree.parents[:, 1:] >= 0)
    n_accepted = mx.sum(mx.cumprod(right.astype(mx.int32), axis=1), axis=1)
    return Acceptance(
        path=mx.where(node <= n_accepted[:, None], node, 0),
        n_accepted=n_accepted,
        last=n_accepted,
        emitted=choices,
        bonus=mx.take_along_axis(choices, n_accepted[:, None], axis=1)[:, 0],
    )


def _with_ancestors(tree: TokenTree, right: mx.array) -> mx.array:
    """Whether each node [B, N] and all its ancestors are valid and right; the root always is."""
    right = (right | is_root(right.shape[1])) & tree.valid
    return mx.all(mx.logical_not(tree.mask) | right[:, None, :], axis=2)
