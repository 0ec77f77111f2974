"""Penalties and biases: logits that depend on the text before them, at every node of a tree.

The repetition penalty is mlx-lm's: it covers a window of the last tokens, prompt included. The
frequency and presence penalties are OpenAI's: they cover all emitted tokens, but not the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors

from redrafter_mlx.config import SamplingParams
from redrafter_mlx.speculation.constants import iota
from redrafter_mlx.speculation.tree import TokenTree


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
    if changes_logits(params):
        logits = logits.astype(mx.float32)
    logits = _processed(logits, None if nodes is None else nodes.window, params)
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


def _processed(logits: mx.array, windows: mx.array | None, params: SamplingParams) -> mx.array:
    """Apply biases and the repetition penalty to logits [B, N, V], with windows [B, N, C]."""
    B, N, V = logits.shape
    for processor in make_logits_processors(logit_bias=dict(params.logit_bias) or None):
        logits = processor(None, logits.reshape(B * N, V)).reshape(B, N, V)
    if windows is None:
        return logits
    seen, penalty = mx.take_along_axis(logits, windows, axis=-1), params.repetition_penalty
    # As in mlx-lm's processor, which knows one window for all rows.
    lowered = mx.where(seen < 0, seen * penalty, seen / penalty)
    return mx.put_along_axis(logits, windows, lowered, axis=-1)
