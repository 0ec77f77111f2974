"""Attention masks of static shape for the nodes of a tree."""

from __future__ import annotations

import mlx.core as mx

from redrafter_mlx.speculation.constants import iota


def attention_mask(tree_mask: mx.array, length: mx.array, extent: int) -> mx.array:
    """Return what each node may attend to: all committed slots, and its own path in the tree.

    With two committed slots and a root with two children, `extent` 6:

        committed  tree    unused
          1 1     1 0 0      0        root
          1 1     1 1 0      0        first child
          1 1     1 0 1      0        second child

    Shapes:
      tree_mask: [B, N, M] bool, which of a tree's M nodes each of N nodes may attend to; N = M in
                 a call on the whole tree
      length:    [B] int32
    Returns:
      [B, 1, N, extent] bool, True = may attend
    """
    B, N, M = tree_mask.shape
    column = iota(extent)[None, :] - length[:, None]  # [B, extent], 0 = the root's slot
    inside = (column >= 0) & (column < M)
    index = mx.broadcast_to(mx.clip(column, 0, M - 1)[:, None, :], (B, N, extent))
    in_tree = mx.take_along_axis(tree_mask, index, axis=2)
    return ((column < 0)[:, None, :] | (inside[:, None, :] & in_tree))[:, None]


def windowed(mask: mx.array, size: int) -> mx.array:
    """Restrict each node's mask to the newest `size` positions, its own included.

    The slots that a node may attend to hold the positions up to its own, in order, so they are
    counted from the right. The nodes of `attention_mask`, in windows of 3 and of 2:

        1 1     1 0 0     0 1     1 0 0
        0 1     1 1 0     0 0     1 1 0
        0 1     1 0 1     0 0     1 0 1

    Shapes:
      mask: [..., extent] bool, True = may attend
    """
    return mask & (mx.cumsum(mask.astype(mx.int32), axis=-1, reverse=True) <= size)


def ring_mask(
    tree_mask: mx.array,
    depths: mx.array,
    length: mx.array,
    window: int,
    slots: int,
    extent: int,
    *,
    apart: bool,
) -> mx.array:
    """Return what each node may attend to of a window whose position p is in slot p % `slots`.

    With 7 committed positions and the tree of `attention_mask`, a window of 3 in 8 slots:

        slot       0 1   2 3 4 5 6   7
        position   8 9   2 3 4 5 6   7
                   0 0   0 0 0 1 1   1     root
                   1 0   0 0 0 0 1   1     first child
                   0 1   0 0 0 0 1   1     second child

    Shapes:
      tree_mask: [B, N, N] bool, in the window
      depths:    [B, N] int32
      length:    [B] int32

    extent: the first slots that are read; all of them, or all that hold something
    apart:  whether the nodes come after these slots, and not in them
    Returns:
      [B, 1, N, extent] bool, or if `apart` [B, 1, N, extent + N]; True = may attend
    """
    B, N, _ = tree_mask.shape
    column = (iota(extent)[None] - length[:, None]) % slots  # [B, extent], 0 = the root's slot
    before = column - slots  # the committed position in the slot, less the root's
    newest = before[:, None] > (depths - window)[:, :, None]
    committed = newest & (before + length[:, None] >= 0)[:, None]
    if apart:
        return mx.concatenate([committed, tree_mask], axis=2)[:, None]
    index = mx.broadcast_to(mx.minimum(column, N - 1)[:, None], (B, N, extent))
    in_tree = mx.take_along_axis(tree_mask, index, axis=2)
    return mx.where((column < N)[:, None], in_tree, committed)[:, None]


def chain_mask(length: mx.array, nodes: int, extent: int) -> mx.array:
    """Return `attention_mask` [B, 1, N, extent] of a chain: slots up to each node's own."""
    own = length[:, None] + iota(nodes)[None]
    return (iota(extent)[None, None] <= own[:, :, None])[:, None]
