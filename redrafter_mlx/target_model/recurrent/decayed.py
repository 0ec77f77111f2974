"""Sums over a node's ancestors that decay on the way to the node, which most recurrences share.

With keys k_j and values v_j that the nodes write, and G_i the sum of log decays over node i and its
ancestors (`upto`), a committed state S0 [Dv, Dk] becomes at node i

    S_i = S0 diag(e^G_i) + sum_upto v_j (e^(G_i - G_j) k_j)^T

Exponents are of differences, as e^-G_j alone would overflow. Arrays are float32, with a batch and
any number of axes for heads.
"""

from __future__ import annotations

import mlx.core as mx

from redrafter_mlx.speculation.constants import is_root
from redrafter_mlx.target_model.recurrent.interface import AcceptedPath, Tape


def attended(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    decay: mx.array,
    mask: mx.array,
    state: mx.array,
) -> tuple[mx.array, Tape]:
    """Return S_i q_i at every node, from one read of the state, and the tape for `committed`.

    Shapes:
      queries, keys: [B, ..., N, Dk], values: [B, ..., N, Dv]
      decay: [B, ..., N, 1], G
      mask:  [B, 1, ..., N, N] bool, True = the second is the first or its ancestor
      state: [B, ..., Dv, Dk]
    Returns:
      [B, ..., N, Dv], and values, keys, decay
    """
    failed = nan_if_not_finite(values) + nan_if_not_finite(mx.sum(keys, axis=-1, keepdims=True))
    keys, values = finite(keys), finite(values)
    between = mx.exp(decay - decay.swapaxes(-1, -2))
    scores = mx.where(mask, (queries @ keys.swapaxes(-1, -2)) * between, 0)
    stored = (queries * mx.exp(decay)) @ state.swapaxes(-1, -2)
    return mx.addmm(stored, scores, values) + failed, (values, keys, decay)


def committed(state: mx.array, tape: Tape, accepted: AcceptedPath) -> mx.array:
    """Return the state [B, H, Dv, Dk] at the end of the accepted path.

    Shapes:
      tape: values [B, ..., N, Dv], keys [B, ..., N, Dk], decay [B, ..., N, 1 or Dk], where the axes
            for heads may be several
    """
    values, keys, decay = tape
    heads = decay.ndim - 3
    on_path = accepted.on_path(decay.shape[-2])
    on_path = on_path.reshape(on_path.shape[0], *[1] * heads, -1, 1)
    last = accepted.last.reshape(-1, *[1] * (heads + 2))
    to_end = mx.take_along_axis(decay, last, axis=-2)
    written = keys * mx.where(on_path, mx.exp(to_end - decay), 0)
    by_head = state.reshape(*values.shape[:-2], *state.shape[-2:])
    after = mx.addmm(by_head * mx.exp(to_end), values.swapaxes(-1, -2), written)
    return after.reshape(state.shape)


def finite(x: mx.array) -> mx.array:
    """Replace what is not finite in nodes [..., N, size] by 0, except in the root; see LayerCache.

    Other nodes than its descendants read 0 times a node's values. `nan_if_not_finite` is added to
    the node's own output, so that the draft is not accepted: plain decoding would not read 0.
    """
    return mx.where((x - x == 0) | is_root(x.shape[-2])[:, None], x, 0)


def nan_if_not_finite(x: mx.array) -> mx.array:
    """Return NaN where x is infinite or NaN, and 0 elsewhere."""
    return x - x
