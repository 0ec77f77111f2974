"""Recurrences without a tree form: each node's state from the state of its parent.

The states of all nodes exist while one layer is called. The tape keeps what the nodes wrote, and
the commit repeats the steps of the accepted path alone. That moves more of the state than a tree
form does, N states for each level of a tree, and serves any recurrence: to add one, say its step.
"""

from __future__ import annotations

from abc import abstractmethod

import mlx.core as mx

from redrafter_mlx.target_model.recurrent.interface import AcceptedPath, Recurrence, Tape, TreeNodes


class ByParent(Recurrence):
    """A recurrence h_i = step(h of the parent of i, what node i writes).

    Shapes:
      state: [B, ...]
      tape:  what the nodes write, each [B, N, ...]
    """

    @abstractmethod
    def step(self, state: mx.array, writes: Tape) -> mx.array:
        """Return the states [B, n, ...] after `writes` [B, n, ...] in states [B, 1 or n, ...]."""

    def states_of(self, nodes: TreeNodes, state: mx.array, writes: Tape) -> mx.array:
        """Return the state at every node, [B, N, ...]; `state` [B, ...] is the committed one."""
        committed = state[:, None]
        if nodes.is_chain:
            states = [committed]
            for i in range(writes[0].shape[1]):
                states.append(self.step(states[-1], tuple([a[:, i : i + 1] for a in writes])))
            return mx.concatenate(states[1:], axis=1)
        before = nodes.windows(2)[..., 0]  # of all states: the committed one, then the nodes'
        before = before.reshape(*before.shape, *[1] * (state.ndim - 1))
        reached = self.step(committed, writes)  # right at the root, after each pass a level further
        for _ in range(nodes.max_depth):
            known = mx.concatenate([committed, reached], axis=1)
            reached = self.step(mx.take_along_axis(known, before, axis=1), writes)
        return reached

    def commit(self, state: mx.array, tape: Tape, accepted: AcceptedPath) -> mx.array:
        path, n_accepted = accepted.arrays
        reached = state[:, None]
        for depth in range(path.shape[1]):
            is_on = depth <= n_accepted
            node = mx.where(is_on, path[:, depth], 0)
            writes = [
                mx.take_along_axis(a, node.reshape(-1, *[1] * (a.ndim - 1)), axis=1) for a in tape
            ]
            after = self.step(reached, tuple(writes))
            reached = mx.where(is_on.reshape(-1, *[1] * state.ndim), after, reached)
        return reached[:, 0]
