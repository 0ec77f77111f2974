"""Which continuations of the host to verify: in the place of the drafter's branches, or beside."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from redrafter_mlx.config import BeamShape
from redrafter_mlx.decoding.sequence import Proposal
from redrafter_mlx.drafting.untrained.continuation import Continuation
from redrafter_mlx.tuning.corrections import StepCosts


class Tree(NamedTuple):
    """What a sequence verifies next, and the best continuation that could be verified.

    shape:    of the tree as it was drafted
    tokens:   expected tokens
    found:    the continuation; None if there is none
    holds:    the chance that each draft of the continuation is accepted, for those that may be made
    branches: the chance that a draft of each depth is accepted; empty if nothing may join them
    """

    shape: BeamShape
    tokens: float
    found: Continuation | None = None
    holds: Sequence[float] = ()
    branches: Sequence[float] = ()

    def revised(self, count: int, *, join: bool) -> tuple[int, float]:
        """Return nodes and expected tokens with up to `count` drafts of its continuation."""
        holds = self.holds[:count]
        if not holds:
            return self.shape.nodes, self.tokens
        if not (join and self.branches):
            return len(holds) + 1, 1 + sum(holds)
        both = zip_longest(holds, self.branches, fillvalue=0.0)
        expected = 1 + sum([hold + (1 - hold) * branch for hold, branch in both])
        return self.shape.nodes + len(holds), expected

    def proposal(self, count: int, *, join: bool) -> Proposal | None:
        """Return the same as a proposal; None without a continuation."""
        count, join = min(count, len(self.holds)), join and bool(self.branches)
        if self.found is None or count == 0:
            return None
        shape = BeamShape(1, count + 1)
        if join:
            length = max(self.shape.length, count + 1)
            shape = BeamShape(self.shape.width + 1, length, self.shape.nodes + count)
        return Proposal(shape, [self.found.first(count)], join)


class Revision(NamedTuple):
    """How many drafts of each continuation are verified, and whether they join the trees.

    nodes: of the largest tree
    """

    drafts: int
    join: bool
    nodes: int


def best_revision(
    trees: Sequence[Tree], pace: float, costs: StepCosts, drafted: BeamShape
) -> Revision | None:
    """Return how many drafts of the continuations gain most time; None if none gains.

    Only a few numbers are possible: each needs its own compiled graph.

    pace:    tokens per second of a sequence in steps without continuations
    drafted: the largest shape of the trees as they were drafted
    """
    longest = max([len(tree.holds) for tree in trees])
    before = sum([tree.tokens for tree in trees]) / len(trees)
    best, chosen = before - pace * costs.without_drafting(drafted), None
    ways = (False, True) if [tree for tree in trees if tree.branches] else (False,)
    for count in (1, 3, 7, 15, 31)[: (longest + 1).bit_length() - 1]:
        for join in ways:
            nodes, tokens = zip(*[t.revised(count, join=join) for t in trees], strict=True)
            if max(nodes) <= costs.max_nodes:
                gain = sum(tokens) / len(trees) - pace * costs.revised(max(nodes))
                if gain > best:
                    best, chosen = gain, Revision(count, join, max(nodes))
    return chosen
