"""The target's verdict on a batch of trees, by each row's own sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import mlx.core as mx

from redrafter_mlx.config import SamplingParams
from redrafter_mlx.decoding.constraint import constrained
from redrafter_mlx.decoding.state import DecodeState
from redrafter_mlx.speculation.accept import Acceptance, accept, accept_typical
from redrafter_mlx.speculation.penalties import Past, past_after, past_at_nodes, penalised
from redrafter_mlx.speculation.rejection import SampledDrafts, accept_rejection
from redrafter_mlx.speculation.sampling import (
    choose,
    sampled_log_probs,
)
from redrafter_mlx.speculation.tree import TokenTree

History = tuple[Past | None, ...]


class Verdict(NamedTuple):
    """The accepted paths, the histories after them, and the logits that tokens were chosen from."""

    accepted: Acceptance
    history: History
    logits: mx.array


def computable(state: DecodeState, hidden: mx.array) -> DecodeState:
    """Return the state with only those drafts that the target computes without NaN.

    Their keys and values are not in the cache as the target computed them, see `LayerCache`. So
    such a draft is not accepted even if the target chooses it; as the next root, it is computed as
    in plain decoding.

    Shapes:
      hidden: [B, N, C], of the trees
    """
    drafts, tree = state.drafts, state.drafts.tree
    if tree.tokens.shape[1] == 1:
        return state
    failed = mx.isnan(mx.sum(hidden, axis=-1))  # [B, N]
    tree = tree._replace(parents=mx.where(failed, -1, tree.parents))
    return replace(state, drafts=drafts._replace(tree=tree))


def judge(state: DecodeState, logits: mx.array, masks: mx.array | None = None) -> Verdict:
    """Choose a token at every node, and decide which drafts to accept.

    Adjacent rows with equal parameters are judged together.

    Shapes:
      logits: [B, N, V]
      masks:  [B, N, ceil(V / 32)], tokens that grammars allow; None allows everything
    """
    runs = [
        list(run)
        for _, run in groupby(
            range(len(state.options)),
            key=lambda b: (
                state.options[b].sampling,
                state.drafts.rows[b].shape if state.drafts.rows[b].drawn else None,
            ),
        )
    ]
    if len(runs) == 1:
        return _judge_alike(state, runs[0], logits, masks)
    parts = []
    for run in runs:
        b = slice(run[0], run[-1] + 1)
        parts.append(_judge_alike(state, run, logits[b], None if masks is None else masks[b]))
    fields = zip(*(part.accepted for part in parts), strict=True)
    return Verdict(
        Acceptance(*(mx.concatenate(list(field)) for field in fields)),
        sum((part.history for part in parts), ()),
        mx.concatenate([part.logits for part in parts]),
    )


def _judge_alike(
    state: DecodeState, rows: Sequence[int], logits: mx.array, masks: mx.array | None
) -> Verdict:
    """Judge rows that have the same sampling parameters; `logits` and `masks` are theirs."""
    drafts, keys, position = state.drafts, state.keys, state.length + 1
    tree, log_probs, noise = drafts.tree, drafts.log_probs, drafts.noise
    if len(rows) < len(state.options):
        run = slice(rows[0], rows[-1] + 1)
        tree, keys, position = tree.take(run), keys[run], position[run]
        log_probs = None if log_probs is None else log_probs[run]
        noise = None if noise is None else noise[run]
    params = state.options[rows[0]].sampling
    before = [past for b in rows if (past := state.history[b]) is not None]
    nodes = past_at_nodes(before, tree) if before else None
    logits = constrained(penalised(logits, nodes, params), masks)
    drawn = log_probs if drafts.rows[rows[0]].drawn else None
    accepted = _accept(
        tree, logits, position, keys, params, drawn, drafts.rows[rows[0]].shape.width, noise
    )
    history: History = (None,) * len(rows)
    if nodes is not None:
        history = tuple(past_after(nodes, accepted.last))
    return Verdict(accepted, history, logits)


def _accept(
    tree: TokenTree,
    logits: mx.array,
    position: mx.array,
    keys: mx.array,
    params: SamplingParams,
    drawn_from: mx.array | None,
    width: int,
    noise: mx.array | None,
) -> Acceptance:
    """Decide which drafts are accepted, by the method of `params`.

    Shapes:
      logits:     [B, N, V], after penalties
      position:   [B] int32, position of the token after the root
      drawn_from: [B, N, V], what drafts were drawn from; None if they were not drawn
      noise:      [B, L, V], shared with the drafter by `sample`; None if it is not drawn yet
    """
    if params.method == "rejection" and drawn_from is not None:
        drafts = SampledDrafts(tree, drawn_from)
        return accept_rejection(drafts, sampled_log_probs(logits, params), position, keys, width)
    shared = noise if params.method == "sample" else None  # rows that share none have no noise
    choices = choose(logits, tree.depths, position, keys, params, tree.max_depth, shared)
    if params.method == "typical":
        log_probs = sampled_log_probs(logits, params)
        return accept_typical(tree, log_probs, choices, params.epsilon, params.delta)
    return accept(tree, choices)
