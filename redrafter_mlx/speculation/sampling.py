"""The target's own choice after every node: the argmax, or one draw from its distribution.

The randomness of a draw belongs to the token's position in the text, not to the step that made the
draw: every node that could become token p uses the noise of p. With `--accept sample` a seed
therefore gives the same text with drafts and without, for every beam shape. Every draw is still
one from the target's distribution, because only one node of a depth is on the accepted path.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_logits_processors

from redrafter_mlx.config import SamplingParams
from redrafter_mlx.speculation.tree import TokenTree

CHOICE, TRIAL, DRAFT = 0, 1, 2
"""Purposes of noise, each independent of the others. Level l of drafting has DRAFT + l."""


def sequence_keys(seed: int, batch: int = 1) -> mx.array:
    """One random key for each batch row: [B, 2] uint32."""
    return mx.random.split(mx.random.key(seed), batch)


def log_softmax(logits: mx.array) -> mx.array:
    """Log-probabilities [..., V] float32."""
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def filtered_log_probs(logits: mx.array, params: SamplingParams) -> mx.array:
    """Log-probabilities after mlx-lm's filters, in the order of its `make_sampler`.

    Shapes:
      logits: [..., V]
    Returns:
      [..., V], divided by the temperature and not normalised again; -inf where filtered
    """
    x = log_softmax(logits)
    if params.top_p < 1.0:
        x = apply_top_p(x, params.top_p)
    if params.min_p > 0.0:
        x = apply_min_p(x, params.min_p)
    if 0 < params.top_k < x.shape[-1]:
        x = apply_top_k(x, params.top_k)
    return x / params.temperature


def sampled_log_probs(logits: mx.array, params: SamplingParams) -> mx.array:
    """The log-probabilities [..., V] that tokens are drawn with: filtered, normalised."""
    return log_softmax(filtered_log_probs(logits, params))


def choose(
    logits: mx.array,
    depths: mx.array,
    position: mx.array,
    keys: mx.array,
    params: SamplingParams,
    max_depth: int,
) -> mx.array:
    """The target's token after every node.

    Shapes:
      logits:   [B, N, V]
      depths:   [B, N] int32
      position: [B] int32, of the token after the root in the text
      keys:     [B, 2] uint32
    Returns:
      [B, N] int32
    """
    if params.greedy:
        return mx.argmax(logits, axis=-1).astype(mx.int32)
    B, _, V = logits.shape
    levels = max_depth + 1
    positions = position[:, None] + mx.arange(levels)[None]  # [B, levels]
    noise = gumbel_at(keys, positions, V, CHOICE).reshape(B * levels, V)
    of_node = mx.arange(B)[:, None] * levels + depths
    x = filtered_log_probs(logits, params) + noise[of_node]
    return mx.argmax(x, axis=-1).astype(mx.int32)


def path_windows(history: mx.array, tree: TokenTree) -> mx.array:
    """The last C tokens up to and including each node, on the node's own path.

    With history a b c and a root r whose child is x, C = 3: the root sees b c r, the child c r x.

    Shapes:
      history: [B, C] int32, the tokens before the root
    Returns:
      [B, N, C] int32
    """
    B, C = history.shape
    N, levels = tree.tokens.shape[1], tree.max_depth + 1
    level = mx.arange(levels)[None, None, :, None]
    here = tree.mask[:, :, None, :] & (tree.depths[:, None, None, :] == level)  # [B, N, L, N]
    lineage = mx.sum(mx.where(here, tree.tokens[:, None, None, :], 0), axis=3)
    text = mx.concatenate([mx.broadcast_to(history[:, None], (B, N, C)), lineage], axis=2)
    index = mx.arange(C)[None, None] + tree.depths[:, :, None] + 1
    return mx.take_along_axis(text, index, axis=2)


def penalised(logits: mx.array, windows: mx.array | None, params: SamplingParams) -> mx.array:
    """Logits [B, N, V] after mlx-lm's logits processors, each node with its own window [B, N, C].

    `windows` may be None where there is no repetition penalty.
    """
    processors = make_logits_processors(
        logit_bias=dict(params.logit_bias) or None,
        repetition_penalty=params.repetition_penalty if has_penalty(params) else None,
        repetition_context_size=params.repetition_context,
    )
    if not processors:
        return logits
    B, N, V = logits.shape
    if windows is None:
        windows = mx.zeros((B, N, 0), mx.int32)
    changed = []
    for node, window in zip(logits.reshape(B * N, 1, V), windows.reshape(B * N, -1), strict=True):
        for processor in processors:
            node = processor(window, node)
        changed.append(node)
    return mx.concatenate(changed, axis=0).reshape(B, N, V)


def has_penalty(params: SamplingParams) -> bool:
    """Whether the choice of a token depends on those before it."""
    return params.repetition_penalty != 1.0


def changes_logits(params: SamplingParams) -> bool:
    """Whether tokens are chosen from other logits than the target's own."""
    return has_penalty(params) or bool(params.logit_bias)


def first_window(tokens: list[int], size: int) -> list[int]:
    """The last `size` of `tokens`; short texts are filled by repeating their first token.

    Repeating changes nothing: a token is penalised once, however often it occurs.
    """
    missing = size - len(tokens)
    return tokens[-size:] if missing <= 0 else [tokens[0]] * missing + tokens


def gumbel_at(keys: mx.array, positions: mx.array, size: int, purpose: int) -> mx.array:
    """Gumbel noise [B, P, size] that depends on key, position [B, P] and purpose alone."""
    return _noise_at(keys, positions, purpose, lambda key: mx.random.gumbel((size,), key=key))


def uniform_at(keys: mx.array, positions: mx.array, size: int, purpose: int) -> mx.array:
    """Uniform noise [B, P, size] in [0, 1), as `gumbel_at`."""
    return _noise_at(
        keys, positions, purpose, lambda key: mx.random.uniform(shape=(size,), key=key)
    )


def _noise_at(
    keys: mx.array, positions: mx.array, purpose: int, draw: Callable[[mx.array], mx.array]
) -> mx.array:
    B, P = positions.shape
    first = mx.broadcast_to(keys[:, :1] + purpose, (B, P))
    second = keys[:, 1:] + positions.astype(mx.uint32)
    at = mx.stack([first, second], axis=-1).reshape(B * P, 2)
    noise: mx.array = mx.vmap(draw)(at)
    return noise.reshape(B, P, -1)
