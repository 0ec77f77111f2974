"""The causal convolution of a few positions, alone (LFM2) or before another recurrence.

Its state is a window of its newest inputs. mlx-lm's modules put it before the new rows and call
their `nn.Conv1d` on both. On a tree, each node's window are its own ancestors.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from redrafter_mlx.target_model.recurrent.interface import AcceptedPath, Recurrence, Tape, TreeNodes


class Window(Recurrence):
    """A state that is a window of the newest inputs.

    Shapes:
      state: [B, k - 1, C]
      tape:  rows [B, k - 1 + N, C], the state and the nodes' inputs
    """

    def windows(self, nodes: TreeNodes, rows: mx.array, size: int) -> mx.array:
        """Return the rows that each node reads, [B N, size, C]."""
        index = nodes.windows(size)
        B, N, _ = index.shape
        windows = mx.take_along_axis(rows, index.reshape(B, N * size, 1), axis=1)
        return windows.reshape(B * N, size, -1)

    def commit(self, state: mx.array, tape: Tape, accepted: AcceptedPath) -> mx.array:
        (rows,) = tape
        index = accepted.window(state.shape[1] + 1)
        return mx.take_along_axis(rows, index[..., None], axis=1)


class Convolution(Window):
    """A depthwise `nn.Conv1d` without padding, with a kernel of k positions."""

    def function(self, layer: nn.Conv1d, rows: mx.array) -> mx.array:
        return layer(rows)

    def on_tree(self, nodes: TreeNodes, layer: nn.Conv1d, rows: mx.array) -> tuple[mx.array, Tape]:
        """Return outputs [B, N, C] of the layer."""
        if nodes.is_chain:
            return layer(rows), (rows,)
        B, N, _ = nodes.mask.shape
        windows = self.windows(nodes, rows, layer.weight.shape[1])
        return layer(windows).reshape(B, N, -1), (rows,)
