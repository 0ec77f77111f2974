"""The target's own choice after every node: the argmax or a draw, after biases and penalties.

The noise of a draw belongs to the token's position in the text, not to the step that makes the
draw: every node that could become the token at position p uses the noise of p. With `--accept
sample`, a seed therefore gives the same text with drafts and without, for every beam shape. The
emitted tokens are still draws from the target's distribution, because only one node of each depth
is on the accepted path.

Biases and penalties depend on the text before a node. The repetition penalty is mlx-lm's: it covers
a window of the last tokens, prompt included. The frequency and presence penalties are OpenAI's:
they cover all emitted tokens, but not the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_logits_processors

from redrafter_mlx.config import SamplingParams
from redrafter_mlx.speculation.constants import iota
from redrafter_mlx.speculation.tree import TokenTree

_MIN_TOP_P = 1e-9
"""At a lower top_p the likeliest token alone is left as well, but 0 in float32 would keep all."""

CHOICE, TRIAL, DRAFT = 0, 1, 2
"""Purposes of noise, independent of each other. Level l of drafting uses DRAFT + l."""


def sequence_keys(seed: int, batch: int = 1) -> mx.array:
    """Return one random key per batch row: [B, 2] uint32."""
    return mx.random.split(mx.random.key(seed), batch)


def log_softmax(logits: mx.array) -> mx.array:
    """Return log-probabilities [..., V] float32."""
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def filtered_logits(logits: mx.array, params: SamplingParams) -> mx.array:
    """Apply mlx-lm's filters, in the order of its `make_sampler`, and the temperature.

    Only the filters by probability need log-probabilities; a draw does not.

    Shapes:
      logits: [..., V]
    Returns:
      [..., V] float32, divided by the temperature and not normalised; -inf where filtered
    """
    by_probability = params.top_p < 1.0 or params.min_p > 0.0
    x = log_softmax(logits) if by_probability else logits.astype(mx.float32)
    if params.top_p < 1.0:
        x = apply_top_p(x, max(params.top_p, _MIN_TOP_P))
    if params.min_p > 0.0:
        x = apply_min_p(x, params.min_p)
    if 0 < params.top_k < x.shape[-1]:
        x = apply_top_k(x, params.top_k)
    return x / params.temperature


def sampled_log_probs(logits: mx.array, params: SamplingParams) -> mx.array:
    """Return the filtered, normalised log-probabilities [..., V] that tokens are drawn from."""
    return log_softmax(filtered_logits(logits, params))


def choose(
    logits: mx.array,
    depths: mx.array,
    position: mx.array,
    keys: mx.array,
    params: SamplingParams,
    max_depth: int,
    noise: mx.array | None = None,
) -> mx.array:
    """Choose the target's token after every node.

    Shapes:
      logits:   [B, N, V]
      depths:   [B, N] int32
      position: [B] int32, of the token after the root in the text
      keys:     [B, 2] uint32
      noise:    [B, L, V], L > max_depth, as `shared_draws` drew it for the drafter; None draws it
    Returns:
      [B, N] int32
    """
    if params.greedy:
        return mx.argmax(logits, axis=-1).astype(mx.int32)
    B, _, V = logits.shape
    if noise is None:
        positions = position[:, None] + iota(max_depth + 1)[None]  # [B, L]
        noise = gumbel_at(keys, positions, V, CHOICE)
    levels = noise.shape[1]
    of_node = iota(B)[:, None] * levels + depths
    x = filtered_logits(logits, params) + noise.reshape(B * levels, V)[of_node]
    return mx.argmax(x, axis=-1).astype(mx.int32)


class Draws(NamedTuple):
    """The noise that the target will draw with after a root, for a drafter to search with.

    Shapes:
      noise:       [B, L, V] float32, of the positions after the root; 0 in rows that share none
      temperature: [B] float32; 1 in rows that share no noise
    """

    noise: mx.array
    temperature: mx.array


def shared_draws(
    keys: mx.array, position: mx.array, rows: Sequence[SamplingParams], levels: int, size: int
) -> Draws | None:
    """Return the draws at `levels` positions from `position` on; None if no row may share them.

    A row shares its noise if the target's own draws are accepted: `sample`. A draft that is tested
    by the ratio of two distributions must not depend on the noise of the test or of the bonus
    token, and `typical` accepts drafts that the target does not draw.

    Shapes:
      keys:     [B, 2] uint32
      position: [B] int32, of the token after the root in the text
    """
    share = [params.method == "sample" for params in rows]
    if not any(share):
        return None
    noise = gumbel_at(keys, position[:, None] + iota(levels)[None], size, CHOICE)
    if not all(share):
        noise = mx.where(mx.array(share)[:, None, None], noise, 0.0)
    each = zip(share, rows, strict=True)
    return Draws(noise, mx.array([params.temperature if own else 1.0 for own, params in each]))


def gumbel_at(keys: mx.array, positions: mx.array, size: int, purpose: int) -> mx.array:
    """Return Gumbel noise [B, P, size] that depends only on key, position [B, P] and purpose."""
    return _noise_at(keys, positions, purpose, lambda key: mx.random.gumbel((size,), key=key))


def uniform_at(keys: mx.array, positions: mx.array, size: int, purpose: int) -> mx.array:
    """Return uniform noise [B, P, size] in [0, 1); see `gumbel_at`."""
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


class Past(NamedTuple):
    """The history that penalties use: of batch rows before their roots, or of nodes.

    The history of a node includes its own token.

    Shapes, with B, N in place of B for nodes:
      window: [B, C] int32, the last tokens; None without a repetition penalty
      counts: [B, V] int32, how often each token was emitted; None without the other penalties
    """

    window: mx.array | None
    counts: mx.array | None


def first_past(prompt: Sequence[int], params: SamplingParams, vocab_size: int) -> Past | None:
    """Return the history before a prompt's last token, one batch row; None without penalties.

    That token is the root of the first tree but was not emitted, so its count starts at -1.
    """
    window = counts = None
    if params.repetition_penalty != 1.0:
        before = list(prompt[:-1] or prompt)
        window = mx.array([first_window(before, params.repetition_context)], mx.int32)
    if params.frequency_penalty or params.presence_penalty:
        counts = -(mx.arange(vocab_size) == prompt[-1]).astype(mx.int32)[None]
    return None if window is None and counts is None else Past(window, counts)


def past_at_nodes(rows: Sequence[Past], tree: TokenTree) -> Past:
    """Return the history of each node [B, N]; all batch rows have the same penalties."""
    windows = [row.window for row in rows if row.window is not None]
    counts = [row.counts for row in rows if row.counts is not None]
    return Past(
        path_windows(mx.concatenate(windows), tree) if windows else None,
        path_counts(mx.concatenate(counts), tree) if counts else None,
    )


def past_after(nodes: Past, last: mx.array) -> list[Past]:
    """Return the history before the next roots, one per batch row: that of nodes `last` [B]."""
    at = last[:, None, None]
    window, counts = (
        None if part is None else mx.take_along_axis(part, at, axis=1)[:, 0] for part in nodes
    )
    return [
        Past(*(None if part is None else part[b : b + 1] for part in (window, counts)))
        for b in range(last.shape[0])
    ]


def penalised(logits: mx.array, nodes: Past | None, params: SamplingParams) -> mx.array:
    """Apply biases and penalties to logits [B, N, V], each node with its own history.

    In float32: in 16 bits a small penalty changes no logit, and a large bias makes unequal ones
    equal.
    """
    if not changes_logits(params):
        return logits
    B, N, V = logits.shape
    logits = logits.astype(mx.float32)
    for processor in make_logits_processors(logit_bias=dict(params.logit_bias) or None):
        logits = processor(None, logits.reshape(B * N, V)).reshape(B, N, V)
    if nodes is not None and nodes.window is not None:
        seen = mx.take_along_axis(logits, nodes.window, axis=-1)
        penalty = params.repetition_penalty
        # As in mlx-lm's processor, which knows one window for all rows.
        lowered = mx.where(seen < 0, seen * penalty, seen / penalty)
        logits = mx.put_along_axis(logits, nodes.window, lowered, axis=-1)
    if nodes is None or nodes.counts is None:
        return logits
    frequency = params.frequency_penalty * nodes.counts
    presence = params.presence_penalty * (nodes.counts > 0)
    return logits - (frequency + presence)


def changes_logits(params: SamplingParams) -> bool:
    """Whether biases or penalties change the target's logits."""
    penalties = params.frequency_penalty, params.presence_penalty, params.repetition_penalty != 1.0
    return any(penalties) or bool(params.logit_bias)


def path_windows(history: mx.array, tree: TokenTree) -> mx.array:
    """Return the last C tokens up to and including each node, along the node's own path.

    With history a b c, a root r with child x, and C = 3: the root sees b c r, the child c r x.

    Shapes:
      history: [B, C] int32, the tokens before the root
    Returns:
      [B, N, C] int32
    """
    B, C = history.shape
    N, levels = tree.tokens.shape[1], tree.max_depth + 1
    level = iota(levels)[None, None, :, None]
    here = tree.mask[:, :, None, :] & (tree.depths[:, None, None, :] == level)  # [B, N, L, N]
    lineage = mx.sum(mx.where(here, tree.tokens[:, None, None, :], 0), axis=3)
    text = mx.concatenate([mx.broadcast_to(history[:, None], (B, N, C)), lineage], axis=2)
    index = iota(C)[None, None] + tree.depths[:, :, None] + 1
    return mx.take_along_axis(text, index, axis=2)


def path_counts(counts: mx.array, tree: TokenTree) -> mx.array:
    """Count each token up to and including each node, along the node's own path.

    Shapes:
      counts: [B, V] int32, before the root
    Returns:
      [B, N, V] int32
    """
    (B, V), N = counts.shape, tree.tokens.shape[1]
    row, node = iota(B)[:, None, None], iota(N)[None, :, None]
    before = mx.broadcast_to(counts[:, None], (B, N, V))
    return before.at[row, node, tree.tokens[:, None]].add(tree.mask.astype(mx.int32))


def first_window(tokens: list[int], size: int) -> list[int]:
    """Return the last `size` of `tokens`; short texts are padded with their first token.

    The padding changes nothing: a token is penalised once, however often it occurs.
    """
    missing = size - len(tokens)
    return tokens[-size:] if missing <= 0 else [tokens[0]] * missing + tokens
