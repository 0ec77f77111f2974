"""The gated linear recurrence of Griffin (arXiv 2402.19427): RecurrentGemma.

A channel's state is h = a h + x, which is also its output, after a convolution.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.recurrent_gemma import Conv1d, rnn_scan

from redrafter_mlx.target_model.recurrent.by_parent import ByParent
from redrafter_mlx.target_model.recurrent.convolution import Window
from redrafter_mlx.target_model.recurrent.interface import Tape, TreeNodes


class GatedScan(ByParent):
    """`rnn_scan`.

    Shapes:
      state: [B, D]
      tape:  a and x, [B, N, D]
    """

    function = staticmethod(rnn_scan)

    def on_tree(
        self, nodes: TreeNodes, x: mx.array, a: mx.array, h0: mx.array | None
    ) -> tuple[tuple[mx.array, None], Tape]:
        state = mx.zeros_like(x[:, 0]) if h0 is None else h0
        return (self.states_of(nodes, state, (a, x)), None), (a, x)

    def step(self, state: mx.array, writes: Tape) -> mx.array:
        a, x = writes
        return a * state + x


class GatedConvolution(Window):
    """RecurrentGemma's own `Conv1d`, which is given its window and returns the next one."""

    def function(self, layer: Conv1d, x: mx.array, cache: mx.array | None = None) -> object:
        return layer(x, cache)

    def on_tree(
        self, nodes: TreeNodes, layer: Conv1d, x: mx.array, cache: mx.array | None = None
    ) -> tuple[tuple[mx.array, None], Tape]:
        B, N, C = x.shape
        size = layer.weight.shape[1]
        if cache is None:
            cache = mx.zeros((B, size - 1, C), x.dtype)
        rows = mx.concatenate([cache, x], axis=1)
        if nodes.is_chain:
            return (layer(x, cache)[0], None), (rows,)
        windows = self.windows(nodes, rows, size)
        outputs, _ = layer(windows[:, -1:], windows[:, :-1])
        return (outputs.reshape(B, N, C), None), (rows,)
