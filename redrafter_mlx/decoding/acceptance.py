"""What the target accepts of a batch of trees, by each sequence's own sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import mlx.core as mx

from redrafter_mlx.decoding.constraint import constrained
from redrafter_mlx.decoding.state import DecodeState
from redrafter_mlx.speculation.accept import Acceptance, accept, accept_typical
from redrafter_mlx.speculation.penalties import Past, past_after, past_at_nodes, penalised
from redrafter_mlx.speculation.rejection import SampledDrafts, accept_rejection
from redrafter_mlx.speculation.sampling import choose, sampled_log_probs
from redrafter_mlx.speculation.tree import TokenTree

History = tuple[Past | None, ...]


class Accepted(NamedTuple):
    """The accepted paths, the histories after them, and the logits that tokens were chosen from."""

    paths: Acceptance
    history: History
    logits: mx.array


def without_nan(tree: TokenTree, hidden: mx.array) -> TokenTree:
    """Return the tree with only those drafts that the target computes without NaN.

    Their keys and values are not in the cache as the target computed them, see `LayerCache`. So
    such a draft is not accepted even if the target chooses it; as the next root, it is computed as
    in plain decoding.

    Shapes:
      hidden: [B, N, C], of the trees
    """
    if tree.tokens.shape[1] == 1:
        return tree
    failed = mx.isnan(mx.sum(hidden, axis=-1))  # [B, N]
    return tree._replace(parents=mx.where(failed, -1, tree.parents))


def accept_drafts(
    state: DecodeState, tree: TokenTree, logits: mx.array, masks: mx.array | None = None
) -> Accepted:
    """Choose a token at every node, and decide which drafts to accept.

    Adjacent sequences with equal parameters are treated together.

    Shapes:
      logits: [B, N, V]
      masks:  [B, N, ceil(V / 32)], tokens that grammars allow; None allows everything

    tree: that of the state's drafts, without what must not be accepted
    """
    made = state.drafts.drafted
    keys = [(s, d.shape if d.drawn else None) for s, d in zip(state.sampling, made, strict=True)]
    runs = [[*run] for _, run in groupby(range(len(keys)), keys.__getitem__)]
    if len(runs) == 1:
        return _accept_alike(state, runs[0], tree, logits, masks)
    parts = []
    for run in runs:
        b = slice(run[0], run[-1] + 1)
        mine = None if masks is None else masks[b]
        parts.append(_accept_alike(state, run, tree.take(b), logits[b], mine))
    fields = zip(*(part.paths for part in parts), strict=True)
    return Accepted(
        Acceptance(*(mx.concatenate(list(field)) for field in fields)),
        sum((part.history for part in parts), ()),
        mx.concatenate([part.logits for part in parts]),
    )


def _accept_alike(
    state: DecodeState,
    rows: Sequence[int],
    tree: TokenTree,
    logits: mx.array,
    masks: mx.array | None,
) -> Accepted:
    """Accept the drafts of rows with the same parameters; tree, logits and masks are theirs."""
    drafts, keys, position = state.drafts, state.keys, state.length + 1
    log_probs, noise = drafts.log_probs, drafts.noise
    if len(rows) < len(state.sampling):
        run = slice(rows[0], rows[-1] + 1)
        keys, position = keys[run], position[run]
        log_probs = None if log_probs is None else log_probs[run]
        noise = None if noise is None else noise[run]
    params, made = state.sampling[rows[0]], drafts.drafted[rows[0]]
    before = [past for b in rows if (past := state.history[b]) is not None]
    nodes = past_at_nodes(before, tree) if before else None
    logits = constrained(penalised(logits, nodes, params), masks)
    if params.method == "rejection" and made.drawn and log_probs is not None:
        drawn, p = SampledDrafts(tree, log_probs), sampled_log_probs(logits, params)
        paths = accept_rejection(drawn, p, position, keys, made.shape.width)
    else:
        # Only `sample` shares its noise with the drafter; of other rows there is none.
        shared = noise if params.method == "sample" else None
        choices = choose(logits, tree.depths, position, keys, params, tree.max_depth, shared)
        if params.method == "typical":
            p = sampled_log_probs(logits, params)
            paths = accept_typical(tree, p, choices, params.epsilon, params.delta)
        else:
            paths = accept(tree, choices)
    history: History = (None,) * len(rows)
    if nodes is not None:
        history = tuple(past_after(nodes, paths.last))
    return Accepted(paths, history, logits)
