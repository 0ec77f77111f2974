"""A step's output on the device, and the one small array of it that the host reads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import mlx.core as mx

from redrafter_mlx.config import BeamShape
from redrafter_mlx.decoding.state import Drafts, RowDrafts
from redrafter_mlx.speculation.accept import Acceptance
from redrafter_mlx.speculation.sampling import log_softmax

Source: TypeAlias = Literal["model", "drafter", "lookup"]
"""Where an emitted token came from: the target's own choice, or an accepted draft."""


@dataclass(frozen=True)
class StepOutput:
    """A step's output on the device.

    Shapes:
      report: [B, 2 + 2 L + 2 N] int32: number of accepted drafts, number of nodes used, emitted
              tokens, path, and the beam and depth of each node; with copies N more values: whether
              each node is a copy
      logits: [B, N, V], None unless log-probabilities were requested

    nodes:  N
    rows:   how the drafts of each batch row were made
    shown:  whether each batch row needs log-probabilities
    """

    report: mx.array
    logits: mx.array | None
    nodes: int
    rows: tuple[RowDrafts, ...]
    shown: tuple[bool, ...]


@dataclass(frozen=True)
class StepResult:
    """One row's step as the host sees it.

    tokens:    emitted tokens: the accepted drafts and the bonus token
    sources:   where each token came from; a draft that both drafter and lookup proposed is the
               drafter's
    path:      the node after which each token was chosen
    beams:     of each node that is not padding, the smallest beam width that contains it, minus one
    depths:    of the same nodes
    shape:     shape that the tree was drafted with
    query_rows: of the target's call for this tree: nodes and padding
    copied:    whether the tree held copies of the text
    seconds:   since the previous step was read, on the host; NaN for the first
    log_probs: the target's log-probabilities [V] float32 that each token was chosen from, on the
               device; None unless requested
    """

    tokens: list[int]
    sources: list[Source]
    path: list[int]
    beams: list[int]
    depths: list[int]
    shape: BeamShape
    query_rows: int
    copied: bool = False
    seconds: float = math.nan
    log_probs: list[mx.array] | None = None

    @property
    def nodes(self) -> int:
        """Number of tree nodes that are not padding."""
        return len(self.beams)


def report_step(
    drafts: Drafts, accepted: Acceptance, logits: mx.array, shown: tuple[bool, ...]
) -> StepOutput:
    """Build the report of verified drafts; `shown` marks the rows that need log-probabilities.

    Shapes:
      logits: [B, N, V]
    """
    tree, copied = drafts.tree, drafts.copied
    nodes = mx.sum(tree.valid.astype(mx.int32), axis=1, keepdims=True)
    kept = [accepted.n_accepted[:, None], nodes, accepted.emitted, accepted.path]
    of_nodes = [tree.beams, tree.depths]
    if copied is not None:
        of_nodes.append(copied.astype(mx.int32))
    report = mx.concatenate([*kept, *of_nodes], axis=1)
    kept_logits = logits if any(shown) else None
    return StepOutput(report, kept_logits, tree.tokens.shape[1], drafts.rows, shown)


def read_report(output: StepOutput) -> list[StepResult]:
    """Read what was accepted, row by row: the one transfer of a step."""
    rows: list[list[int]] = output.report.tolist()  # type: ignore[assignment]
    N, any_copied = output.nodes, any(row.copied for row in output.rows)
    results = []
    for b, (accepted, nodes, *rest) in enumerate(rows):
        L, kept = (len(rest) - (2 + any_copied) * N) // 2, accepted + 1
        emitted, path, of_nodes = rest[:L], rest[L : L + kept], rest[2 * L :]
        copied = of_nodes[2 * N :] or [0] * N
        drafts: list[Source] = ["lookup" if copied[node] else "drafter" for node in path[1:]]
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
                copied=output.rows[b].copied,
                log_probs=log_probs,
            )
        )
    return results
