"""RWKV 7 (arXiv 2503.14456): a delta rule whose transition is a diagonal plus one of rank one.

One head with state S [Dv, Dk] reads a position's query r, decay w, key k, value v, and removal a, b

    S = S diag(w) + (S a) b^T + v k^T,   output S r

Both its mixers also read the inputs of the position before.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rwkv7 import Rwkv7TimeMixing, TokenShift

from redrafter_mlx.target_model.recurrent.by_parent import ByParent
from redrafter_mlx.target_model.recurrent.convolution import Window
from redrafter_mlx.target_model.recurrent.interface import Tape, TreeNodes


class TimeMixing(ByParent):
    """`Rwkv7TimeMixing._wkv7`. The state is rounded after every position, as mlx-lm's is.

    Shapes:
      state: [B, H, Dv, Dk]
      tape:  w, k, v, a, b, each [B, N, H, D]
    """

    function = staticmethod(Rwkv7TimeMixing._wkv7)

    def on_tree(
        self,
        nodes: TreeNodes,
        mixer: nn.Module,
        r: mx.array,
        w: mx.array,
        k: mx.array,
        v: mx.array,
        a: mx.array,
        b: mx.array,
        state: mx.array | None,
    ) -> tuple[tuple[mx.array, None], Tape]:
        del mixer
        B, _, H, D = r.shape
        if state is None:
            state = mx.zeros((B, H, D, D), r.dtype)
        writes = w, k, v, a, b
        states = self.states_of(nodes, state, writes)
        return ((states @ r[..., None]).squeeze(-1).astype(r.dtype), None), writes

    def step(self, state: mx.array, writes: Tape) -> mx.array:
        w, k, v, a, b = [part.astype(mx.float32) for part in writes]
        removed = (state @ a[..., None]) @ b[..., None, :]
        after = state * w[..., None, :] + v[..., None] @ k[..., None, :] + removed
        return after.astype(state.dtype)


class ShiftedInputs(Window):
    """`TokenShift`: the inputs [B, N, D] of the positions before; a window of two."""

    def function(self, layer: TokenShift, x: mx.array, state: mx.array | None) -> mx.array:
        return layer(x, state)

    def on_tree(
        self, nodes: TreeNodes, layer: TokenShift, x: mx.array, state: mx.array | None
    ) -> tuple[mx.array, Tape]:
        del layer
        if state is None:
            state = mx.zeros_like(x[:, :1])
        rows = mx.concatenate([state, x], axis=1)
        if nodes.is_chain:
            return rows[:, :-1], (rows,)
        before = nodes.windows(2)[..., :1]
        return mx.take_along_axis(rows, before, axis=1), (rows,)
