"""What the host reads of a step: one small array."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from redrafter_mlx.decoding.acceptance import Accepted
from redrafter_mlx.decoding.proposal import Drafted
from redrafter_mlx.decoding.state import DecodeState
from redrafter_mlx.response import Source, StepResult
from redrafter_mlx.speculation.sampling import log_softmax


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
