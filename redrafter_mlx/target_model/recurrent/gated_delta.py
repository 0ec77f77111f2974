"""The gated delta rule (arXiv 2412.06464): Qwen3-Next and 3.5, OLMo-Hybrid; with vector gates Kimi.

One head with state S [Dv, Dk] reads a position's key k, value v, decay g and rate b as

    S = S diag(g) + d k^T,   d = b (v - S diag(g) k),   output S q

With G_i the sum of log g over node i and its ancestors, S0 the committed state, `below` the proper
ancestors j of node i, and `upto` those and i itself, the outputs y and the state at node a are

    d_i = b_i (v_i - S0 (e^G_i k_i) - sum_below (k_i . e^(G_i - G_j) k_j) d_j)
    y_i = S0 (e^G_i q_i) + sum_upto (q_i . e^(G_i - G_j) k_j) d_j
    S_a = S0 diag(e^G_a) + sum_upto d_j (e^(G_a - G_j) k_j)^T

The sums of d are exact after one product for each depth. (The inverse by repeated squares would
take fewer, but its terms cancel: those of 32 equal keys are as large as 1e8.) The rest is as in
`decayed`.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import gated_delta_update

from redrafter_mlx.speculation.constants import iota
from redrafter_mlx.target_model.recurrent.decayed import committed, finite, nan_if_not_finite
from redrafter_mlx.target_model.recurrent.interface import (
    AcceptedPath,
    Recurrence,
    Tape,
    TreeNodes,
    chain_of,
    whole_path,
)

_CHAIN = 32
"""Tokens of a prompt that are read as one chain: longer ones take more products, shorter ones read
the state more often."""


class GatedDelta(Recurrence):
    """`gated_delta_update`; each of its Hk heads of keys belongs to r = Hv / Hk heads of values.

    Shapes:
      state: [B, Hv, Dv, Dk] float32
      tape:  d [B, Hk, r, N, Dv], k [B, Hk, 1, N, Dk], G [B, Hk, r, N, 1 or Dk], float32
    """

    def function(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        a: mx.array,
        b: mx.array,
        A_log: mx.array,
        dt_bias: mx.array,
        state: mx.array | None = None,
        mask: mx.array | None = None,
        **options: Any,
    ) -> tuple[mx.array, mx.array]:
        """Call mlx-lm's function; without its kernel for Metal, read prompts as chains of nodes.

        In place of that kernel, mlx-lm reads and writes the state once for every token.
        """
        B, T = q.shape[:2]
        if T == 1 or mask is not None or mx.metal.is_available():
            result: tuple[mx.array, mx.array] = gated_delta_update(
                q, k, v, a, b, A_log, dt_bias, state, mask, **options
            )
            return result
        if state is None:
            state = mx.zeros((B, v.shape[2], v.shape[3], k.shape[3]))
        outputs, given = [], (q, k, v, a, b)
        for at in range(0, T, _CHAIN):
            part = [x[:, at : at + _CHAIN] for x in given]
            nodes = chain_of(B, part[0].shape[1])
            q, k, v, a, b = part
            (out, _), tape = self.on_tree(nodes, q, k, v, a, b, A_log, dt_bias, state, **options)
            state = self.commit(state, tape, whole_path(nodes))
            outputs.append(out)
        return mx.concatenate(outputs, axis=1), state

    def on_tree(
        self,
        nodes: TreeNodes,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        a: mx.array,
        b: mx.array,
        A_log: mx.array,
        dt_bias: mx.array,
        state: mx.array | None = None,
        mask: None = None,
        *,
        use_kernel: bool = True,
        lower_bound: float | None = None,
        allow_neg_eigval: bool = False,
    ) -> tuple[tuple[mx.array, None], Tape]:
        """Return outputs [B, N, Hv, Dv] of what mlx-lm's function is given.

        Shapes:
          q, k: [B, N, Hk, Dk], v: [B, N, Hv, Dv], b: [B, N, Hv]
          a:    [B, N, Hv], or [B, N, Hv, Dk] for a vector gate
        """
        del mask, use_kernel
        B, N, Hk, Dk = k.shape
        Hv, Dv = v.shape[2:]
        heads = (B, Hk, Hv // Hk)

        def by_head(x: mx.array, *heads: int) -> mx.array:
            return x.astype(mx.float32).swapaxes(1, 2).reshape(B, *heads, N, -1)

        if state is None:
            state = mx.zeros((B, Hv, Dv, Dk))
        rate = by_head(mx.sigmoid(b) * (2.0 if allow_neg_eigval else 1.0), *heads[1:])
        decay = by_head(nodes.sums(_log_decay(a, A_log, dt_bias, lower_bound)), *heads[1:])
        own = by_head(k, Hk, 1)
        readers = mx.concatenate([own, by_head(q, Hk, 1)], axis=3)  # [B, Hk, 1, 2N, Dk]
        decays = mx.concatenate([decay, decay], axis=3)
        stored = (readers * mx.exp(decays)) @ state.reshape(*heads, Dv, Dk).swapaxes(-1, -2)
        keys = finite(own)
        scores = _scores(readers, keys, decay, nodes.mask)

        given = rate * (by_head(v, *heads[1:]) - stored[..., :N, :])
        first = deltas = finite(given)
        below = finite(mx.where(iota(N)[:, None] == iota(N), 0, -rate * scores[..., :N, :]))
        for _ in range(nodes.max_depth):
            deltas = mx.addmm(first, below, deltas)
        outputs = mx.addmm(stored[..., N:, :], scores[..., N:, :], deltas)
        outputs, given = (x.reshape(B, Hv, N, Dv).swapaxes(1, 2) for x in (outputs, given))
        outputs = outputs + nan_if_not_finite(given)  # so it is if the node's key is not finite
        return (outputs.astype(q.dtype), None), (deltas, keys, decay)

    def commit(self, state: mx.array, tape: Tape, accepted: AcceptedPath) -> mx.array:
        return committed(state, tape, accepted)


def _scores(readers: mx.array, keys: mx.array, decay: mx.array, mask: mx.array) -> mx.array:
    """Return the product of each reader and each key, decayed from the key's node to the reader's.

    Shapes:
      readers: [B, Hk, 1, 2N, Dk], the nodes' keys and their queries
      keys:    [B, Hk, 1, N, Dk]
      decay:   [B, Hk, r, N, 1 or Dk]
      mask:    [B, N, N] bool
    Returns:
      [B, Hk, r, 2N, N], 0 where the key's node is not the reader's or its ancestor
    """
    N = keys.shape[3]
    between = mx.exp(decay[..., :, None, :] - decay[..., None, :, :])  # [B, Hk, r, N, N, 1 or Dk]
    seen = mx.concatenate([mask, mask], axis=1)[:, None, None]
    if decay.shape[-1] == 1:
        between = mx.concatenate([between[..., 0], between[..., 0]], axis=3)
        return mx.where(seen, (readers @ keys.swapaxes(-1, -2)) * between, 0)
    pairs = mx.stack([readers[..., :N, :], readers[..., N:, :]], axis=-1)  # [B, Hk, 1, N, Dk, 2]
    products = (between * keys[..., None, :, :]) @ pairs  # [B, Hk, r, N, N, 2]
    both = mx.concatenate([products[..., 0], products[..., 1]], axis=3)
    return mx.where(seen, both, 0)


def _log_decay(
    a: mx.array, A_log: mx.array, dt_bias: mx.array, lower_bound: float | None
) -> mx.array:
    """Return log g, by mlx-lm's formulas of g."""
    rate = mx.exp(A_log.astype(mx.float32))
    if lower_bound is None:
        return -rate * nn.softplus(a + dt_bias)
    return lower_bound * mx.sigmoid(rate * (a.astype(mx.float32) + dt_bias))
