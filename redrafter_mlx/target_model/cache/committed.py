"""Accepted paths on their way into the text's slots, and what is committed there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from redrafter_mlx.speculation.constants import iota


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
