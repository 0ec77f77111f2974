"""Linear attention with a fixed decay for each head (arXiv 2401.04658): Ling and Ring.

One head with state S [Dk, Dv] reads a position's key k, value v and query q as

    S = e^g S + k v^T,   output S^T q

These are the sums of `decayed`, of the transposed state. One of mlx-lm's models keeps it in
float32, the other in the model's precision.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from redrafter_mlx.target_model.recurrent.decayed import attended, committed
from redrafter_mlx.target_model.recurrent.interface import AcceptedPath, Recurrence, Tape, TreeNodes


class FixedDecay(Recurrence):
    """`recurrent_gla` of one of mlx-lm's modules.

    Shapes:
      state: [B, H, Dk, Dv]
      tape:  v [B, H, N, Dv], k [B, H, N, Dk], G [B, H, N, 1], float32
    """

    def __init__(self, function: Callable[..., tuple[mx.array, mx.array]]) -> None:
        self._function = function

    def function(self, *given: object, **named: object) -> tuple[mx.array, mx.array]:
        return self._function(*given, **named)

    def on_tree(
        self,
        nodes: TreeNodes,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        scale: float,
        h: mx.array | None = None,
        mask: mx.array | None = None,
    ) -> tuple[tuple[mx.array, None], Tape]:
        """Return outputs [B, H, N, Dv] of what mlx-lm's function is given.

        Shapes:
          q, k: [B, H, N, Dk], v: [B, H, N, Dv], g: [H]
        """
        del mask
        count = mx.maximum(nodes.depths, 0) + 1
        decay = (count[:, None] * g[:, None])[..., None]  # [B, H, N, 1]
        if h is None:
            h = mx.zeros((*k.shape[:2], k.shape[3], v.shape[3]))
        queries, state = q.astype(mx.float32) * scale, h.astype(mx.float32).swapaxes(-1, -2)
        keys, values = k.astype(mx.float32), v.astype(mx.float32)
        outputs, tape = attended(queries, keys, values, decay, nodes.mask[:, None], state)
        return (outputs.astype(q.dtype), None), tape

    def commit(self, state: mx.array, tape: Tape, accepted: AcceptedPath) -> mx.array:
        # The keys decay in the rows of the state, whose transpose they are the columns of.
        before = state.astype(mx.float32).swapaxes(-1, -2)
        after = committed(before, tape, accepted)
        return after.swapaxes(-1, -2).astype(state.dtype)
