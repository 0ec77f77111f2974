"""Choice of the copies of the text that gain most time over the trees as they were drafted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import NamedTuple

from redrafter_mlx.config import BeamShape
from redrafter_mlx.decoding.proposal import Proposal
from redrafter_mlx.drafting.continuation import Continuation
from redrafter_mlx.tuning.copies.statistics import LONG_MATCH, CopyStatistics

_COPY_LENGTHS = (1, 3, 7, 15, 31)
"""Numbers of copied drafts; few, because each row count needs its own compiled graph."""

_COPY_MARGIN = 0.3
"""Minimum number of tokens that a copy must promise beyond the tree as it was drafted. Less is
within the error of a promise; speeds with 0.1 to 0.6 differ by less than noise."""

_UNSURE_DRAFTS = 3
"""Maximum number of drafts copied from a match that is not long while it is not known what such a
step takes: a wrong copy of more can cost several plain steps, a tenth of a short answer."""

_BESIDE_COPY = 0.7
"""Acceptance rate of a drafter's branches where the copy next to them is wrong, as a share of their
usual rate. Assumed: both tend to fail at the same positions."""


class Drafted(NamedTuple):
    """What copies may replace or join in one row.

    match:    the best n-gram match of the row's text; None if there is none
    shape:    shape of the tree as it was drafted
    branches: the chance that a draft of each depth is accepted; empty if no copy may join them
    tokens:   expected tokens of the tree as it was drafted
    """

    match: Continuation | None
    shape: BeamShape
    branches: Sequence[float]
    tokens: float


class CopyTree(NamedTuple):
    """The tree of one row, with a copy in it, or as it was drafted.

    plan:   the copy in it; None leaves the tree as it was drafted
    tokens: expected tokens
    holds:  the chance that the copy is accepted in full, 0 without a copy
    """

    plan: Proposal | None
    shape: BeamShape
    tokens: float
    holds: float = 0.0


def best_copies(
    rows: Sequence[Drafted],
    statistics: CopyStatistics,
    pace: float,
    drafted_seconds: float,
    seconds_of: Callable[[int, int], float],
    uncertain: Callable[[int, float], float],
    most_nodes: int,
) -> tuple[list[CopyTree], float] | None:
    """Return each row's tree with the copies whose verification gains most, and the step's seconds.

    Return None if no copies gain anything.

    Args:
      pace: tokens per second of a row in steps without copies
      drafted_seconds: seconds of the step with the trees as they were drafted, without drafting
      seconds_of: the same as a function of the nodes and the width of the largest tree
      uncertain: by how much a step of so many nodes and seconds may take longer, until such steps
        with copies are timed
    """
    best = sum(row.tokens for row in rows) / len(rows) - pace * drafted_seconds + _COPY_MARGIN
    chosen = None
    long = any(row.match is not None and row.match.matched >= LONG_MATCH for row in rows)
    most_unsure = _COPY_LENGTHS[-1] if long else _UNSURE_DRAFTS
    for count in (n for n in _COPY_LENGTHS if n <= max(_most_copied(row.match) for row in rows)):
        for joined in (False, True) if any(row.branches for row in rows) else (False,):
            trees = [_with_copy(row, count, joined, statistics) for row in rows]
            nodes = max(tree.shape.nodes for tree in trees)
            if nodes > most_nodes:
                continue
            seconds = seconds_of(nodes, max(tree.shape.width for tree in trees))
            tokens = sum(tree.tokens for tree in trees) / len(trees)
            doubt = 0.0 if statistics.knows_cost(nodes) else uncertain(nodes, seconds)
            if doubt and count > most_unsure:
                continue
            gain = tokens - pace * (statistics.cost(nodes) * seconds + doubt)
            if gain > best:
                best, chosen = gain, (trees, seconds)
    return chosen


def _with_copy(row: Drafted, longest: int, joined: bool, statistics: CopyStatistics) -> CopyTree:
    """Return a row's tree with as many copied drafts as its match allows, at most `longest`."""
    most = min(longest, _most_copied(row.match))
    count = max((n for n in _COPY_LENGTHS if n <= most), default=0)
    if row.match is None or count == 0:
        return CopyTree(None, row.shape, row.tokens)
    copy = Continuation(row.match.tokens[:count], row.match.log_probs[:count], row.match.matched)
    trust = statistics.trust(copy.matched)
    holds = [trust * math.exp(p) for p in copy.log_probs]
    joined = joined and bool(row.branches)
    shape = BeamShape(1, count + 1)
    if joined:
        W, L, N = row.shape.width, row.shape.length, row.shape.nodes
        shape = BeamShape(W + 1, max(L, count + 1), N + count)
    tokens = 1 + _accepted(holds, row.branches if joined else ())
    return CopyTree(Proposal(shape, [copy], joined), shape, tokens, holds[-1])


def _most_copied(copy: Continuation | None) -> int:
    """Return the number of drafts that may be copied from a match.

    From a match that is not long, at most twice its length, however well others were accepted.
    """
    if copy is None:
        return 0
    drafts = len(copy.log_probs)
    return min(2 * copy.matched, drafts) if copy.matched < LONG_MATCH else drafts


def _accepted(holds: Sequence[float], branches: Sequence[float]) -> float:
    """Return the expected accepted drafts of a copy and the drafter's branches in one tree."""
    both = zip_longest(holds, branches, fillvalue=0.0)
    return sum(hold + (1 - hold) * _BESIDE_COPY * branch for hold, branch in both)
