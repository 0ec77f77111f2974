"""The state-space recurrence of Mamba 2 (arXiv 2405.21060): Nemotron-H, Granite 4, Falcon-H1.

One head with state h [P, S] reads a position's input x, step dt, and directions B and C as

    h = e^(dt A) h + dt x B^T,   output h C + D x

These are the sums of `decayed`, with keys B, values dt x, queries C and log decays dt A. In
prompts, mlx-lm computes the same for chains.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.ssm import compute_dt, ssm_update

from redrafter_mlx.target_model.recurrent.decayed import attended, committed
from redrafter_mlx.target_model.recurrent.interface import AcceptedPath, Recurrence, Tape, TreeNodes


class StateSpace(Recurrence):
    """`ssm_update`; each of its K groups of directions belongs to r = H / K heads.

    Shapes:
      state: [B, H, P, S] float32
      tape:  dt x [B, K, r, N, P], B [B, K, 1, N, S], G [B, K, r, N, 1], float32
    """

    function = staticmethod(ssm_update)

    def on_tree(
        self,
        nodes: TreeNodes,
        x: mx.array,
        A_log: mx.array,
        B: mx.array,
        C: mx.array,
        D: mx.array,
        dt: mx.array,
        dt_bias: mx.array,
        state: mx.array | None = None,
        time_step_limit: tuple[float, float] = (0.001, 100.0),
        mask: mx.array | None = None,
        lengths: None = None,
    ) -> tuple[tuple[mx.array, None], Tape]:
        """Return outputs [B, N, H, P] of what mlx-lm's function is given.

        Shapes:
          x: [B, N, H, P], B, C: [B, N, K, S], dt: [B, N, H]
        """
        del lengths
        batch, N, H, P = x.shape
        K, S = B.shape[2:]
        heads = (batch, K, H // K)
        dt = compute_dt(dt, dt_bias, time_step_limit)
        rates = dt * -mx.exp(A_log).astype(dt.dtype)
        decay = nodes.sums(rates).swapaxes(1, 2).reshape(*heads, N, 1)
        inputs = (dt[..., None] * x).swapaxes(1, 2).reshape(*heads, N, P)
        writes = B.astype(mx.float32).swapaxes(1, 2)[:, :, None]
        reads = C.astype(mx.float32).swapaxes(1, 2)[:, :, None]
        if state is None:
            state = mx.zeros((batch, H, P, S))
        by_head, mask = state.reshape(*heads, P, S), nodes.mask[:, None, None]
        outputs, tape = attended(reads, writes, inputs, decay, mask, by_head)
        outputs = outputs.reshape(batch, H, N, P).swapaxes(1, 2).astype(x.dtype)
        return (outputs + x * D[:, None], None), tape

    def commit(self, state: mx.array, tape: Tape, accepted: AcceptedPath) -> mx.array:
        return committed(state, tape, accepted)
