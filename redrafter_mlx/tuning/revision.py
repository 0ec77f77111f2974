"""Which continuations of the host to verify: in the place of the drafter's branches, or beside."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import NamedTuple

from redrafter_mlx.config import BeamShape
from redrafter_mlx.decoding.proposal import Proposal
from redrafter_mlx.drafting.continuation import Continuation
from redrafter_mlx.tuning.acceptance import Trust


class Tree(NamedTuple):
    """What a sequence verifies next, and what is expected of it.

    shape:    of the tree
    tokens:   expected tokens
    found:    the best continuation that could be verified; None if there is none
    longest:  maximum number of its drafts
    branches: the chance that a draft of each depth is accepted; empty if nothing may join them
    proposal: the continuation that is verified; None if the tree is as it was drafted
    holds:    the chance that the continuation is accepted in full, 0 without one
    """

    shape: BeamShape
    tokens: float
    found: Continuation | None = None
    longest: int = 0
    branches: Sequence[float] = ()
    proposal: Proposal | None = None
    holds: float = 0.0

    def revised(self, count: int, trust: Trust, *, join: bool) -> Tree:
        """Return it with `count` drafts of its continuation, or as many as that may have."""
        count = min(count, self.longest)
        if self.found is None or count == 0:
            return self
        found = self.found.first(count)
        trusted = trust.of(found.kind)
        holds = [trusted * math.exp(p) for p in found.log_probs]
        shape, branches = BeamShape(1, count + 1), self.branches if join else ()
        if branches:
            W, L, N = self.shape.width, self.shape.length, self.shape.nodes
            shape = BeamShape(W + 1, max(L, count + 1), N + count)
        both = zip_longest(holds, branches, fillvalue=0.0)
        expected = 1 + sum([hold + (1 - hold) * branch for hold, branch in both])
        proposal = Proposal(shape, [found], bool(branches))
        return self._replace(shape=shape, tokens=expected, proposal=proposal, holds=holds[-1])


def best_revision(
    trees: Sequence[Tree],
    trust: Trust,
    pace: float,
    drafted_seconds: float,
    seconds_of: Callable[[int, int], float],
    max_nodes: int,
) -> list[Tree] | None:
    """Return each tree with the continuations whose verification gains most; None if none gains.

    Args:
      trust: how far continuations of each kind are accepted
      pace: tokens per second of a sequence in steps without continuations
      drafted_seconds: seconds of the step with the trees as they were drafted, without drafting
      seconds_of: the same with continuations, as a function of nodes and width of the largest tree
    """
    longest, count = max([tree.longest for tree in trees]), 1
    best, chosen = _gain(trees, pace * drafted_seconds), None
    ways = (False, True) if any(tree.branches for tree in trees) else (False,)
    while count <= longest:
        for join in ways:
            revised = [tree.revised(count, trust, join=join) for tree in trees]
            nodes = max([tree.shape.nodes for tree in revised])
            width = max([tree.shape.width for tree in revised])
            if nodes <= max_nodes:
                gain = _gain(revised, pace * seconds_of(nodes, width))
                if gain > best:
                    best, chosen = gain, revised
        count = 2 * count + 1
    return chosen


def _gain(trees: Sequence[Tree], missed: float) -> float:
    return sum([tree.tokens for tree in trees]) / len(trees) - missed
