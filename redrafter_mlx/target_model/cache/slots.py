"""Slots of key and value buffers: how many, what nodes may attend to, where accepted paths go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from redrafter_mlx.runtime.device import backend
from redrafter_mlx.speculation.constants import iota

CAPACITY_STEP = 256
"""Buffers grow in steps of this many slots, so that they are rarely copied."""

SPARE_STEP = 32
"""Copies of a cache, which nothing may be appended to for long, end at a multiple of this many
slots."""

EXTENT_STEPS = {"cpu": 64, "apple": CAPACITY_STEP, "cuda": 128}
"""Attention reads the buffers up to the bound of the length, rounded up to a multiple of this many
slots, or in long texts by up to an eighth: each extent needs its own compiled graph. A CPU computes
attention over 32 slots too many for half a millisecond a row, and compiles a graph for some 40;
with hundreds too many it would take longer. A GPU hardly notices them (Metal's kernel for few query
rows reads no masked slot), and waits while the host builds."""


def grown(buffer: mx.array, capacity: int) -> mx.array:
    """Return a buffer [B, K, T, head size] with zeros after it, `capacity` slots in all."""
    B, K, known, size = buffer.shape
    larger = mx.zeros((B, K, capacity, size), buffer.dtype)
    larger[:, :, :known] = buffer  # in place; a concatenation would hold the new zeros twice
    return larger


def round_up(n: int, step: int) -> int:
    """Round `n` up to a multiple of `step`."""
    return -(-n // step) * step


def concatenate_padded(arrays: Sequence[mx.array]) -> mx.array:
    """Concatenate arrays [B, ...] along the batch; zeros pad the other axes to equal sizes."""
    largest = [max(sizes) for sizes in zip(*(a.shape[1:] for a in arrays), strict=True)]

    def padded(a: mx.array) -> mx.array:
        missing = [n - m for n, m in zip(largest, a.shape[1:], strict=True)]
        # MLX would copy an array to pad it by nothing.
        return mx.pad(a, [(0, 0), *((0, n) for n in missing)]) if any(missing) else a

    return mx.concatenate([padded(a) for a in arrays])


def planned_capacity(length: int, nodes: int) -> int:
    """Return the capacity that a tree of `nodes` nodes after `length` positions needs."""
    return round_up(extent_of(length + nodes), CAPACITY_STEP)


def extent_of(slots: int) -> int:
    """Return the number of slots that attention reads of the first `slots`; see EXTENT_STEPS."""
    return round_up(slots, max(EXTENT_STEPS[backend()], (1 << slots.bit_length()) >> 4))


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


@dataclass(frozen=True)
class Pending:
    """An accepted path whose keys and values are still in tree order.

    Shapes:
      path:       [B, L] int32 nodes, root first
      n_accepted: [B] int32, drafts accepted (the root not counted)
      length:     [B] int32, committed length before the path
    """

    path: mx.array
    n_accepted: mx.array
    length: mx.array

    def moves(self, nodes: int) -> mx.array:
        """Return the slot [B, 1, M, 1] of each of the tree's M nodes, after the committed text.

        With path 0-2, one draft accepted, of 4 nodes, after 5 positions: 5, 7, 6, 7. Nodes that
        were not accepted go to the next root's slot, which the root is written to after them.
        """
        return self._positions(nodes)[0][:, None, :, None]

    def positions(self, nodes: int) -> mx.array:
        """Return the position [B, M] of each of the tree's M nodes, -1 if it was not accepted.

        Those of the example above: 5, -1, 6, -1.
        """
        positions, end = self._positions(nodes)
        return mx.where(positions < end, positions, -1)

    def _positions(self, nodes: int) -> tuple[mx.array, mx.array]:
        """Return the position of each node [B, M], the text's end if not accepted; the end."""
        depth = iota(self.path.shape[1])[:, None]
        accepted = depth <= self.n_accepted[:, None, None]
        here = (self.path[:, :, None] == iota(nodes)) & accepted  # [B, L, M]
        after = 1 + self.n_accepted[:, None]
        depths = mx.min(mx.where(here, depth, after[:, :, None]), axis=1)
        return self.length[:, None] + depths, self.length[:, None] + after


class Committed(NamedTuple):
    """Keys and values of committed positions, in slots of which some hold none.

    Shapes:
      keys, values: [B, K, S, head size] of each layer
      positions:    [B, S] int32 of each layer's slots in the text, -1 where nothing is committed
    """

    keys: tuple[mx.array, ...]
    values: tuple[mx.array, ...]
    positions: tuple[mx.array, ...]

    def of(self, layers: Sequence[int]) -> Committed:
        """Return those of some of the layers."""
        keys, values, positions = (tuple(each[i] for i in layers) for each in self)
        return Committed(keys, values, positions)
