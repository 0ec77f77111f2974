"""Which drafts are kept: the walk from the root along the target's own choices.

Every node carries one token that the target chose to follow it. A draft is right when it is
that token; the path ends at the first node none of whose children is, and that node's choice
is the bonus token. Whatever the drafts, each emitted token is the target's own choice given the
tokens before it, so this is lossless.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from redrafter_mlx.tree import TokenTree


class Acceptance(NamedTuple):
    """What one verification keeps.

    Shapes:
      path:       [B, L] int32 nodes, root first; 0 behind the accepted ones
      n_accepted: [B] int32, drafts accepted (the root not counted)
      last:       [B] int32, the deepest accepted node
      emitted:    [B, L] int32, the tokens that follow the root: the accepted drafts and, at
                  place n_accepted, the bonus token; what is behind it means nothing
      bonus:      [B] int32, the target's choice at the deepest accepted node
    """

    path: mx.array
    n_accepted: mx.array
    last: mx.array
    emitted: mx.array
    bonus: mx.array


def accept(tree: TokenTree, choices: mx.array) -> Acceptance:
    """Walk from the root to the child that bears the chosen token, as far as there is one.

    Siblings differ in their token, so at most one child is right and the accepted nodes are one
    path.

    Shapes:
      choices: [B, N] int32, the target's token behind each node
    """
    N = tree.tokens.shape[1]
    node = mx.arange(N)[None]
    asked = mx.take_along_axis(choices, mx.maximum(tree.parents, 0), axis=1)
    right = (tree.tokens == asked) | (node == 0)
    accepted = mx.all(mx.logical_not(tree.mask) | right[:, None, :], axis=2) & tree.valid

    n_accepted = mx.max(mx.where(accepted, tree.depths, 0), axis=1)
    level = mx.arange(tree.max_depth + 1)[None, :, None]
    here = accepted[:, None, :] & (tree.depths[:, None, :] == level)  # [B, L, N]
    path = mx.sum(mx.where(here, node[:, None], 0), axis=2)
    last = mx.take_along_axis(path, n_accepted[:, None], axis=1)
    return Acceptance(
        path=path,
        n_accepted=n_accepted,
        last=last[:, 0],
        emitted=mx.take_along_axis(choices, path, axis=1),
        bonus=mx.take_along_axis(choices, last, axis=1)[:, 0],
    )
