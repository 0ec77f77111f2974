"""The causal convolution of a few positions, alone (LFM2) or before another recurrence.

Its state is a window of its newest inputs. mlx-lm's modules put it before the new rows and call
their `nn.Conv1d` on both. On a tree, each node's window are its own ancestors.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from redrafter_mlx.target_model.recurrent.interface import AcceptedPath, Recurrence, Tape, TreeNodes


class Convolution(Recurrence):
    """A depthwise `nn.Conv1d` without padding, with a kernel of k positions.

    Shapes:
      state: [B, k - 1, C]
      tape:  rows [B, k - 1 + N, C], the state and the nodes' inputs
    """

    def function(self, layer: nn.Conv1d, rows: mx.array) -> mx.array:
        return layer(rows)

    def on_tree(self, nodes: TreeNodes, layer: nn.Conv1d, rows: mx.array) -> tuple[mx.array, Tape]:
        """Return outputs [B, N, C] of the layer."""
        if nodes.is_chain:
            return layer(rows), (rows,)
        size = layer.weight.shape[1]
        index = nodes.windows(size)
        B, N, _ = index.shape
        windows = mx.take_along_axis(rows, index.reshape(B, N * size, 1), axis=1)
        return layer(windows.reshape(B * N, size, -1)).reshape(B, N, -1), (rows,)

    def commit(self, state: mx.array, tape: Tape, accepted: AcceptedPath) -> mx.array:
        (rows,) = tape
        index = accepted.window(state.shape[1] + 1)
        return mx.take_along_axis(rows, index[..., None], axis=1)
