"""Copies of the texts that gain most time over the trees as they were drafted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from redrafter_mlx.autotune.acceptance import CopyStatistics
from redrafter_mlx.config import BeamShape
from redrafter_mlx.decoding.copies import CopyPlan
from redrafter_mlx.drafting.prompt_lookup import Copy

_COPY_LENGTHS = (1, 3, 7, 15, 31)
"""Few, because each row count is a compiled graph of its own."""

_LONG_MATCH = 8
"""Shorter matches are copied for twice their length at most, however well others have held."""

_COPY_MARGIN = 0.1
"""Tokens that a copy must promise more than the tree as it was drafted."""

_BESIDE_COPY = 0.7
"""How good a drafter's branches are where the copy beside them is wrong, as a share of how good
they are otherwise. Assumed: both tend to fail at the same positions."""


@dataclass(frozen=True)
class Drafted:
    """What copies may replace or join in one row.

    match:    the best one of the row's text; None if there is none
    shape:    of the tree as it was drafted
    branches: the chance that a draft of each depth is accepted; empty where no copy may join them
    tokens:   expected of the tree as it was drafted
    """

    match: Copy | None
    shape: BeamShape
    branches: Sequence[float]
    tokens: float


@dataclass(frozen=True)
class CopyChoice:
    """The copies of a step.

    copies:  of each row; None where the text has no match and what was drafted stays
    shapes:  of the trees of all rows
    joined:  of each row, whether the drafter's branches stay beside its copy
    holds:   the chance of each row's copy to be accepted throughout, 0 without one
    seconds: predicted for the step
    """

    copies: Sequence[Copy | None]
    shapes: Sequence[BeamShape]
    joined: Sequence[bool]
    holds: Sequence[float]
    seconds: float

    def plans(self, draft_after: bool) -> list[CopyPlan | None]:
        """For the loop; `draft_after` holds where copies stand alone."""
        return [
            None if copy is None else CopyPlan([copy], shape, joined, joined or draft_after)
            for copy, shape, joined in zip(self.copies, self.shapes, self.joined, strict=True)
        ]


def best_copies(
    rows: Sequence[Drafted],
    statistics: CopyStatistics,
    pace: float,
    drafted_seconds: float,
    seconds_of: Callable[[int, int], float],
    most_nodes: int,
) -> CopyChoice | None:
    """The copies whose verification gains most; None if they gain nothing.

    Args:
      pace: tokens a second of a row otherwise
      drafted_seconds: of the step with the trees as they were drafted, the drafting left out
      seconds_of: the same by the nodes and the width of the largest tree
    """
    trust = statistics.trust
    best = sum(row.tokens for row in rows) / len(rows) - pace * drafted_seconds + _COPY_MARGIN
    chosen = None
    for count in (n for n in _COPY_LENGTHS if n <= max(_most_copied(row.match) for row in rows)):
        for joined in (False, True) if any(row.branches for row in rows) else (False,):
            trees = [_Tree.of(row, count, joined, trust) for row in rows]
            nodes = max(tree.shape.nodes for tree in trees)
            if nodes > most_nodes:
                continue
            seconds = seconds_of(nodes, max(tree.shape.width for tree in trees))
            tokens = sum(tree.tokens for tree in trees) / len(trees)
            gain = tokens - pace * statistics.cost * seconds
            if gain > best:
                best, chosen = gain, (trees, seconds)
    if chosen is None:
        return None
    trees, seconds = chosen
    return CopyChoice(
        [tree.copy for tree in trees],
        [tree.shape for tree in trees],
        [tree.joined for tree in trees],
        [tree.holds for tree in trees],
        seconds,
    )


@dataclass(frozen=True)
class _Tree:
    """The tree of one row with a copy of some length in it, or as it was drafted."""

    copy: Copy | None
    shape: BeamShape
    joined: bool
    holds: float
    tokens: float

    @classmethod
    def of(cls, row: Drafted, longest: int, joined: bool, trust: float) -> _Tree:
        """With as many drafts as the row's match allows, `longest` at most."""
        most = min(longest, _most_copied(row.match))
        count = max((n for n in _COPY_LENGTHS if n <= most), default=0)
        if row.match is None or count == 0:
            return cls(None, row.shape, False, 0.0, row.tokens)
        copy = Copy(row.match.tokens[:count], row.match.log_probs[:count], row.match.matched)
        holds = [trust * math.exp(p) for p in copy.log_probs]
        joined = joined and bool(row.branches)
        shape = BeamShape(1, count + 1)
        if joined:
            W, L, N = row.shape.width, row.shape.length, row.shape.nodes
            shape = BeamShape(W + 1, max(L, count + 1), N + count)
        tokens = 1 + _accepted(holds, row.branches if joined else ())
        return cls(copy, shape, joined, holds[-1], tokens)


def _most_copied(copy: Copy | None) -> int:
    """Drafts that may be copied of a match."""
    if copy is None:
        return 0
    drafts = len(copy.log_probs)
    return min(2 * copy.matched, drafts) if copy.matched < _LONG_MATCH else drafts


def _accepted(holds: Sequence[float], branches: Sequence[float]) -> float:
    """Expected accepted drafts of a copy and of the drafter's branches in one tree."""
    both = zip_longest(holds, branches, fillvalue=0.0)
    return sum(hold + (1 - hold) * _BESIDE_COPY * branch for hold, branch in both)
