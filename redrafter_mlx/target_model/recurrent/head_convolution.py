"""Baichuan M1's convolution of two keys, and of two values, of each head before attention."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.baichuan_m1 import Attention

from redrafter_mlx.target_model.recurrent.interface import AcceptedPath, Recurrence, Tape, TreeNodes


class HeadConvolution(Recurrence):
    """`Attention._custom_convolution`.

    Shapes:
      state: [B, K, 1, D], the keys or values of the position before
      tape:  [B, K, 1 + N, D], the state and the nodes' own
    """

    function = staticmethod(Attention._custom_convolution)

    def on_tree(
        self,
        nodes: TreeNodes,
        mixer: nn.Module,
        u: mx.array,
        weights: mx.array,
        state: mx.array | None = None,
    ) -> tuple[mx.array, Tape]:
        """Return outputs [B, K, N, D] of u [B, K, N, D]."""
        B, K, N, D = u.shape
        rows = mx.concatenate([mx.zeros_like(u[:, :, :1]) if state is None else state, u], axis=2)
        if nodes.is_chain:
            return self.function(mixer, u, weights, rows[:, :, :1]), (rows,)
        before = mx.take_along_axis(rows, nodes.windows(2)[:, None, :, :1], axis=2)
        alone = [a.swapaxes(1, 2).reshape(B * N, K, 1, D) for a in (u, before)]
        outputs = self.function(mixer, alone[0], weights, alone[1])
        return outputs.reshape(B, N, K, D).swapaxes(1, 2), (rows,)

    def commit(self, state: mx.array, tape: Tape, accepted: AcceptedPath) -> mx.array:
        del state
        (rows,) = tape
        return mx.take_along_axis(rows, accepted.window(2)[:, None, :, None], axis=2)
