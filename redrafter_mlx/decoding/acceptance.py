"""What the target accepts of a batch of trees, and the small array that the host reads of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import mlx.core as mx

from redrafter_mlx.decoding.constraint import constrained
from redrafter_mlx.decoding.sequence import Drafted
from redrafter_mlx.decoding.state import DecodeState
from redrafter_mlx.drafting.interface import Features, Seen
from redrafter_mlx.response import Source, StepResult
from redrafter_mlx.speculation.accept import Acceptance, accept, accept_typical
from redrafter_mlx.speculation.rejection import SampledDrafts, accept_rejection
from redrafter_mlx.speculation.sampling import (
    Past,
    choose,
    log_softmax,
    past_after,
    past_at_nodes,
    penalised,
    sampled_log_probs,
)
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
    logits = penalised(logits, nodes, params)
    if masks is not None:
        logits = constrained(logits, masks)
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


class Report(NamedTuple):
    """A step's outcome on the device.

    Shapes:
      values: [B, 2 + 2 L + 2 N] int32: number of accepted drafts, number of nodes used, emitted
              tokens, path, and the beam and depth of each node; with continuations from the host
              N more values: whether each node is only theirs
      logits: [B, N, V], None unless log-probabilities were requested

    nodes:         N
    drafted:       how the drafts of each sequence were made
    logprobs:      whether each sequence's results hold log-probabilities
    max_committed: maximum number of tokens that the step adds to a committed text
    """

    values: mx.array
    logits: mx.array | None
    nodes: int
    drafted: tuple[Drafted, ...]
    logprobs: tuple[bool, ...]
    max_committed: int

    def read(self) -> list[StepResult]:
        """Read what was accepted, sequence by sequence: the one transfer of a step."""
        rows: list[list[int]] = self.values.tolist()  # type: ignore[assignment]
        return [self._result(b, *row) for b, row in enumerate(rows)]

    def _result(self, b: int, accepted: int, nodes: int, *rest: int) -> StepResult:
        N, parts = self.nodes, 3 if any(made.from_host for made in self.drafted) else 2
        L, kept = (len(rest) - parts * N) // 2, accepted + 1
        path, of_nodes = [*rest[L : L + kept]], [*rest[2 * L :]]
        from_host = of_nodes[2 * N :] or [0] * N
        sources: list[Source] = ["lookup" if from_host[node] else "drafter" for node in path[1:]]
        log_probs = None
        if self.logits is not None and self.logprobs[b]:
            log_probs = [log_softmax(self.logits[b, node]) for node in path]
            mx.async_eval(log_probs)  # an unevaluated array would keep all logits in memory
        return StepResult(
            tokens=[*rest[:kept]],
            sources=[*sources, "model"],
            path=path,
            beams=of_nodes[:nodes],
            depths=of_nodes[N : N + nodes],
            shape=self.drafted[b].shape,
            query_rows=N,
            from_host=self.drafted[b].from_host,
            log_probs=log_probs,
        )


def report_of(state: DecodeState, accepted: Accepted) -> Report:
    """Build the report of a state's verified drafts."""
    drafts, paths, tree = state.drafts, accepted.paths, state.drafts.tree
    nodes = mx.sum(tree.valid.astype(mx.int32), axis=1, keepdims=True)
    values = [paths.n_accepted[:, None], nodes, paths.emitted, paths.path, tree.beams, tree.depths]
    if drafts.from_host is not None:
        values.append(drafts.from_host.astype(mx.int32))
    return Report(
        mx.concatenate(values, axis=1),
        accepted.logits if any(state.logprobs) else None,
        tree.tokens.shape[1],
        drafts.drafted,
        state.logprobs,
        tree.max_depth + 1,
    )


def newest_positions(
    state: DecodeState, hidden: mx.array, accepted: Acceptance, bound: int, features: Features
) -> Seen:
    """Return the accepted path of a verified tree, or only its last position if that is enough.

    Shapes:
      hidden: [B, N, C], of the tree

    bound: upper bound of state.length
    """
    tree = state.drafts.tree
    end = bound + tree.max_depth + 1
    if not features.every_position:
        last = accepted.last[:, None]
        tokens = [mx.take_along_axis(tree.tokens, last, axis=1), accepted.bonus[:, None]]
        read = mx.take_along_axis(hidden, last[:, :, None], axis=1) if features.any else None
        position = state.length + accepted.n_accepted
        one = mx.ones(position.shape, mx.int32)
        return Seen(mx.concatenate(tokens, axis=1), read, position, one, end)
    path, count = accepted.path, accepted.n_accepted + 1
    read = mx.take_along_axis(hidden, path[:, :, None], axis=1) if features.any else None
    tokens = [tree.tokens[:, :1], accepted.emitted]
    return Seen(mx.concatenate(tokens, axis=1), read, state.length, count, end)
