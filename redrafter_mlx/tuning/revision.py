"""Which continuations of the host to verify: in the place of the drafter's branches, or beside."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

from redrafter_mlx.config import BeamShape
from redrafter_mlx.decoding.proposal import Proposal
from redrafter_mlx.drafting.untrained.continuation import Continuation


@dataclass(frozen=True)
class Tree:
    """What a sequence verifies next, and the best continuation that could be verified.

    shape:    of the tree as it was drafted
    tokens:   expected tokens
    found:    the continuation; None if there is none
    trusted:  how far continuations of its kind are accepted
    longest:  maximum number of its drafts
    branches: the chance that a draft of each depth is accepted; empty if nothing may join them
    """

    shape: BeamShape
    tokens: float
    found: Continuation | None = None
    trusted: float = 1.0
    longest: int = 0
    branches: Sequence[float] = ()

    @cached_property
    def holds(self) -> list[float]:
        """The chance that each draft of the continuation is accepted."""
        log_probs = self.found.log_probs[: self.longest] if self.found is not None else ()
        return [self.trusted * math.exp(p) for p in log_probs]

    @cached_property
    def size(self) -> tuple[int, int]:
        """Nodes and width as it was drafted."""
        return self.shape.nodes, self.shape.width

    def revised(self, count: int, *, join: bool) -> tuple[int, int, float]:
        """Return nodes, width and expected tokens with up to `count` drafts of its continuation."""
        count = min(count, self.longest)
        if count == 0:
            return *self.size, self.tokens
        holds = self.holds[:count]
        if not (join and self.branches):
            return count + 1, 1, 1 + sum(holds)
        nodes, width = self.size
        both = zip_longest(holds, self.branches, fillvalue=0.0)
        expected = 1 + sum([hold + (1 - hold) * branch for hold, branch in both])
        return nodes + count, width + 1, expected

    def proposal(self, count: int, *, join: bool) -> Proposal | None:
        """Return the same as a proposal; None without a continuation."""
        count = min(count, self.longest)
        if self.found is None or count == 0:
            return None
        shape, join = BeamShape(1, count + 1), join and bool(self.branches)
        if join:
            nodes, width, _ = self.revised(count, join=True)
            shape = BeamShape(width, max(self.shape.length, count + 1), nodes)
        return Proposal(shape, [self.found.first(count)], join)


def best_revision(
    trees: Sequence[Tree],
    pace: float,
    drafted_seconds: float,
    seconds_of: Callable[[int, int], float],
    max_nodes: int,
) -> tuple[int, bool] | None:
    """Return how many drafts of the continuations gain most time, and whether they join the trees.

    None if none gains. Only a few numbers are possible: each needs its own compiled graph.

    Args:
      pace: tokens per second of a sequence in steps without continuations
      drafted_seconds: seconds of the step with the trees as they were drafted, without drafting
      seconds_of: the same with continuations, as a function of nodes and width of the largest tree
      max_nodes: maximum nodes of a tree
    """
    longest, count = max([tree.longest for tree in trees]), 1
    best, chosen = sum([tree.tokens for tree in trees]) / len(trees) - pace * drafted_seconds, None
    ways = (False, True) if [tree for tree in trees if tree.branches] else (False,)
    while count <= longest:
        for join in ways:
            revised = [tree.revised(count, join=join) for tree in trees]
            nodes, widths, tokens = zip(*revised, strict=True)
            if max(nodes) <= max_nodes:
                gain = sum(tokens) / len(trees) - pace * seconds_of(max(nodes), max(widths))
                if gain > best:
                    best, chosen = gain, (count, join)
        count = 2 * count + 1
    return chosen
