"""The target's own choice behind every node: the argmax, or one draw from its distribution.

The randomness of a draw belongs to the place of the token in the text, not to the step that made
it: every node that could become token p uses the noise of p. A seed therefore gives the same
text with drafts and without, for every beam shape, and every draw is still one from the target's
distribution, because only one node of a depth is on the path that is kept.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from redrafter_mlx.config import SamplingParams


def sequence_keys(seed: int, batch: int = 1) -> mx.array:
    """One random key for each row of a batch: [B, 2] uint32."""
    return mx.random.split(mx.random.key(seed), batch)


def filtered_log_probs(logits: mx.array, params: SamplingParams) -> mx.array:
    """Log-probabilities after mlx-lm's filters, in the order of its `make_sampler`.

    Shapes:
      logits: [..., V]
    Returns:
      [..., V], divided by the temperature and not normalised again; -inf where filtered
    """
    logits = logits.astype(mx.float32)
    x = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    if params.top_p < 1.0:
        x = apply_top_p(x, params.top_p)
    if params.min_p > 0.0:
        x = apply_min_p(x, params.min_p)
    if 0 < params.top_k < x.shape[-1]:
        x = apply_top_k(x, params.top_k)
    return x / params.temperature


def choose(
    logits: mx.array,
    depths: mx.array,
    position: mx.array,
    keys: mx.array,
    params: SamplingParams,
    max_depth: int,
) -> mx.array:
    """The target's token behind every node.

    Shapes:
      logits:   [B, N, V]
      depths:   [B, N] int32
      position: [B] int32, where the token behind the root stands in the text
      keys:     [B, 2] uint32
    Returns:
      [B, N] int32
    """
    if params.greedy:
        return mx.argmax(logits, axis=-1).astype(mx.int32)
    B, _, V = logits.shape
    levels = max_depth + 1
    place = position[:, None] + mx.arange(levels)[None]  # [B, levels]
    noise = _gumbel_at(keys, place, V).reshape(B * levels, V)
    row = mx.arange(B)[:, None] * levels + depths
    x = filtered_log_probs(logits, params) + noise[row]
    return mx.argmax(x, axis=-1).astype(mx.int32)


def _gumbel_at(keys: mx.array, place: mx.array, size: int) -> mx.array:
    """Gumbel noise [B, P, size] that depends on a row's key and a place [B, P] alone."""
    B, P = place.shape
    first = mx.broadcast_to(keys[:, :1], (B, P))
    second = keys[:, 1:] + place.astype(mx.uint32)
    at = mx.stack([first, second], axis=-1).reshape(B * P, 2)
    draw = mx.vmap(lambda key: mx.random.gumbel((size,), key=key))
    return draw(at).reshape(B, P, size)
