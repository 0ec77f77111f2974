"""What a step leaves on the device, and what the host reads of it: one small array."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from redrafter_mlx.accept import Acceptance
from redrafter_mlx.config import BeamShape
from redrafter_mlx.sampling import log_softmax
from redrafter_mlx.tree import TokenTree


@dataclass(frozen=True)
class StepOutput:
    """What a step leaves on the device.

    Shapes:
      report: [B, 2 + 2 L + 2 N] int32: drafts accepted, nodes used, emitted tokens, path, and
              the beam and depth of each node
      logits: [B, N, V]

    shape: what the tree was drafted with
    """

    report: mx.array
    logits: mx.array
    shape: BeamShape


@dataclass(frozen=True)
class StepResult:
    """One row's step as the host knows it.

    tokens: what was emitted: the accepted drafts and the bonus token
    path:   the node behind which each of them was chosen
    beams:  of each node of the tree that was not padding, one less than the beams that reach it
    depths: of the same nodes
    shape:  what the tree was drafted with
    rows:   nodes and padding, all of which the target's call computed
    logits: [B, N, V], kept on the device
    row:    which row of the batch
    """

    tokens: list[int]
    path: list[int]
    beams: list[int]
    depths: list[int]
    shape: BeamShape
    rows: int
    logits: mx.array
    row: int

    @property
    def nodes(self) -> int:
        """Nodes of the tree that were not padding."""
        return len(self.beams)

    def log_probs(self, i: int) -> mx.array:
        """The target's log-probabilities [V] float32 for the i-th emitted token."""
        return log_softmax(self.logits[self.row, self.path[i]])


def report_step(
    tree: TokenTree, shape: BeamShape, accepted: Acceptance, logits: mx.array
) -> StepOutput:
    """The report of a verified tree that was drafted with `shape`."""
    nodes = mx.sum(tree.valid.astype(mx.int32), axis=1, keepdims=True)
    kept = [accepted.n_accepted[:, None], nodes, accepted.emitted, accepted.path]
    report = mx.concatenate([*kept, tree.beams, tree.depths], axis=1)
    return StepOutput(report, logits, shape)


def read_report(output: StepOutput) -> list[StepResult]:
    """The one transfer of a step: what was accepted, row by row."""
    rows: list[list[int]] = output.report.tolist()  # type: ignore[assignment]
    N = output.logits.shape[1]
    results = []
    for b, (accepted, nodes, *rest) in enumerate(rows):
        L, kept = len(rest) // 2 - N, accepted + 1
        emitted, path, of_nodes = rest[:L], rest[L : 2 * L], rest[2 * L :]
        results.append(
            StepResult(
                tokens=emitted[:kept],
                path=path[:kept],
                beams=of_nodes[:nodes],
                depths=of_nodes[N : N + nodes],
                shape=output.shape,
                rows=N,
                logits=output.logits,
                row=b,
            )
        )
    return results
