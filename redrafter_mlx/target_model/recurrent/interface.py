"""The one interface of every recurrence: its outputs at the nodes of a tree, and its commit.

A layer with a recurrent state computes each position from the state after the position before. On a
tree, a node's state is that after its parent. Keeping a state for each node would take N times the
memory and traffic of a step. So a recurrence here has a *tree form*: the outputs of all nodes from
one read of the committed state. What it computes on the way, its *tape*, is small. The commit makes
the state after the accepted path from the committed state and the tape; it is part of the next
call, and where the path ends is known on the device alone.

To add a recurrence, write one file with a class that derives from `Recurrence`, and name the
function in `mixers.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeAlias

import mlx.core as mx

from redrafter_mlx.speculation.constants import iota

Tape: TypeAlias = "tuple[mx.array, ...]"
"""What a recurrence keeps of a tree for its commit; each array has the batch as its first axis."""


class TreeNodes:
    """The nodes of a batch of trees, as recurrences read them.

    Shapes:
      mask:   [B, N, N] bool, True = node j is node i or its ancestor
      depths: [B, N] int32, 0 at the root

    max_depth: static upper bound of the depths
    is_chain:  static; every node but padding is the child of the node before it
    """

    def __init__(self, mask: mx.array, depths: mx.array, max_depth: int, is_chain: bool) -> None:
        self.mask, self.depths = mask, depths
        self.max_depth, self.is_chain = max_depth, is_chain
        self._windows: dict[int, mx.array] = {}

    @property
    def arrays(self) -> tuple[mx.array, mx.array]:
        return self.mask, self.depths

    def sums(self, x: mx.array) -> mx.array:
        """Return the sum of x [B, N, ...] over each node and its ancestors.

        Not by a product of matrices, which TF32 would round.
        """
        if self.is_chain:
            return mx.cumsum(x, axis=1)
        mask = self.mask.reshape(*self.mask.shape, *[1] * (x.ndim - 2))
        return mx.sum(mx.where(mask, x[:, None], 0), axis=2)

    def windows(self, size: int) -> mx.array:
        """Return the rows [B, N, size] that each node's convolution reads, the oldest first.

        They are those of the node and its ancestors, and before the root the newest of the
        committed window's size - 1 rows, which come first. A root with two children, size 3:

            rows     0 1 | 2 3 4       the window, and the nodes
            root     0 1 2
            first      1 2 3
            second     1 2   4
        """
        if size not in self._windows:
            N = self.depths.shape[1]
            depth = mx.maximum(self.depths, 0)[:, :, None] + (iota(size) - (size - 1))
            here = self.mask[:, :, None] & (self.depths[:, None, None] == depth[..., None])
            node = mx.sum(mx.where(here, iota(N), 0), axis=-1)
            self._windows[size] = (size - 1) + mx.where(depth < 0, depth, node)
        return self._windows[size]


class AcceptedPath:
    """The accepted path of the trees before, for the commit.

    Shapes:
      path:       [B, L] int32 nodes, root first; undefined after the accepted ones
      n_accepted: [B] int32, drafts accepted (the root not counted)
    """

    def __init__(self, path: mx.array, n_accepted: mx.array) -> None:
        self._path, self._n_accepted = path, n_accepted
        self._on_path: dict[int, mx.array] = {}
        self._windows: dict[int, mx.array] = {}

    @property
    def arrays(self) -> tuple[mx.array, mx.array]:
        return self._path, self._n_accepted

    @property
    def last(self) -> mx.array:
        """[B] int32, the node at which the path ends."""
        return mx.take_along_axis(self._path, self._n_accepted[:, None], axis=1)[:, 0]

    def on_path(self, nodes: int) -> mx.array:
        """Return which of the trees' nodes are on the path: [B, nodes] bool."""
        if nodes not in self._on_path:
            kept = iota(self._path.shape[1]) <= self._n_accepted[:, None]
            here = (self._path[:, :, None] == iota(nodes)) & kept[:, :, None]
            self._on_path[nodes] = mx.any(here, axis=1)
        return self._on_path[nodes]

    def window(self, size: int) -> mx.array:
        """Return the rows [B, size - 1] of `TreeNodes.windows` that a next node would read."""
        if size not in self._windows:
            L = self._path.shape[1]
            depth = self._n_accepted[:, None] + (iota(size - 1) - (size - 2))
            node = mx.take_along_axis(self._path, mx.clip(depth, 0, L - 1), axis=1)
            self._windows[size] = (size - 1) + mx.where(depth < 0, depth, node)
        return self._windows[size]


def chain_of(batch: int, nodes: int) -> TreeNodes:
    """Return chains of nodes, as a text is."""
    depths = mx.broadcast_to(iota(nodes), (batch, nodes))
    mask = mx.broadcast_to(iota(nodes)[:, None] >= iota(nodes), (batch, nodes, nodes))
    return TreeNodes(mask, depths, nodes - 1, True)


def whole_path(chain: TreeNodes) -> AcceptedPath:
    """Return the path of all nodes of chains."""
    B, N = chain.depths.shape
    return AcceptedPath(chain.depths, mx.full((B,), N - 1, mx.int32))


class Recurrence(ABC):
    """One recurrence: the tree form of a function of mlx-lm."""

    @abstractmethod
    def function(self, *given: Any, **named: Any) -> object:
        """Call mlx-lm's own function, which reads prompts and single tokens."""

    @abstractmethod
    def on_tree(self, nodes: TreeNodes, *given: Any, **named: Any) -> tuple[object, Tape]:
        """Return what the function returns, at all nodes, and the tape.

        The state that it returns is not used: the cache commits the tape.
        """

    @abstractmethod
    def commit(self, state: mx.array, tape: Tape, accepted: AcceptedPath) -> mx.array:
        """Return the state after the accepted path."""
