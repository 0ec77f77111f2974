"""A step's output on the device, and the one small array of it that the host reads."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from redrafter_mlx.decoding.proposal import Drafted
from redrafter_mlx.decoding.state import Drafts
from redrafter_mlx.response import Source, StepResult
from redrafter_mlx.speculation.accept import Acceptance
from redrafter_mlx.speculation.sampling import log_softmax


@dataclass(frozen=True)
class StepOutput:
    """A step's output on the device.

    Shapes:
      report: [B, 2 + 2 L + 2 N] int32: number of accepted drafts, number of nodes used, emitted
              tokens, path, and the beam and depth of each node; with continuations from the host
              N more values: whether each node is only theirs
      logits: [B, N, V], None unless log-probabilities were requested

    nodes:  N
    rows:   how the drafts of each batch row were made
    shown:  whether each batch row needs log-probabilities
    """

    report: mx.array
    logits: mx.array | None
    nodes: int
    rows: tuple[Drafted, ...]
    shown: tuple[bool, ...]


def report_step(
    drafts: Drafts, accepted: Acceptance, logits: mx.array, shown: tuple[bool, ...]
) -> StepOutput:
    """Build the report of verified drafts; `shown` marks the rows that need log-probabilities.

    Shapes:
      logits: [B, N, V]
    """
    tree, from_host = drafts.tree, drafts.from_host
    nodes = mx.sum(tree.valid.astype(mx.int32), axis=1, keepdims=True)
    kept = [accepted.n_accepted[:, None], nodes, accepted.emitted, accepted.path]
    of_nodes = [tree.beams, tree.depths]
    if from_host is not None:
        of_nodes.append(from_host.astype(mx.int32))
    report = mx.concatenate([*kept, *of_nodes], axis=1)
    kept_logits = logits if any(shown) else None
    return StepOutput(report, kept_logits, tree.tokens.shape[1], drafts.rows, shown)


def read_report(output: StepOutput) -> list[StepResult]:
    """Read what was accepted, row by row: the one transfer of a step."""
    rows: list[list[int]] = output.report.tolist()  # type: ignore[assignment]
    N, any_from_host = output.nodes, any(row.from_host for row in output.rows)
    results = []
    for b, (accepted, nodes, *rest) in enumerate(rows):
        L, kept = (len(rest) - (2 + any_from_host) * N) // 2, accepted + 1
        emitted, path, of_nodes = rest[:L], rest[L : L + kept], rest[2 * L :]
        from_host = of_nodes[2 * N :] or [0] * N
        drafts: list[Source] = ["lookup" if from_host[node] else "drafter" for node in path[1:]]
        log_probs = None
        if output.logits is not None and output.shown[b]:
            log_probs = [log_softmax(output.logits[b, node]) for node in path]
            mx.async_eval(log_probs)  # an unevaluated array would keep all logits in memory
        results.append(
            StepResult(
                tokens=emitted[:kept],
                sources=[*drafts, "model"],
                path=path,
                beams=of_nodes[:nodes],
                depths=of_nodes[N : N + nodes],
                shape=output.rows[b].shape,
                query_rows=N,
                from_host=output.rows[b].from_host,
                log_probs=log_probs,
            )
        )
    return results
