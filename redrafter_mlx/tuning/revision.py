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

_LENGTHS = (1, 3, 7, 15, 31)
"""Numbers of drafts in a continuation; few, because each row count needs its own compiled graph."""


class Revisable(NamedTuple):
    """What a continuation may replace or join in one sequence's tree.

    found:    the best continuation; None if there is none
    longest:  maximum number of its drafts
    shape:    shape of the tree as it was drafted
    branches: the chance that a draft of each depth is accepted; empty if nothing may join them
    tokens:   expected tokens of the tree as it was drafted
    """

    found: Continuation | None
    longest: int
    shape: BeamShape
    branches: Sequence[float]
    tokens: float


class RevisedTree(NamedTuple):
    """A sequence's tree with a continuation in it, or as it was drafted.

    proposal: the continuation in it; None leaves the tree as it was drafted
    tokens:   expected tokens
    holds:    the chance that the continuation is accepted in full, 0 without one
    """

    proposal: Proposal | None
    shape: BeamShape
    tokens: float
    holds: float = 0.0


def best_revision(
    trees: Sequence[Revisable],
    trust: Trust,
    pace: float,
    drafted_seconds: float,
    seconds_of: Callable[[int, int], float],
    max_nodes: int,
) -> list[RevisedTree] | None:
    """Return each tree with the continuations whose verification gains most; None if none gains.

    Args:
      trust: how far continuations of each kind are accepted
      pace: tokens per second of a sequence in steps without continuations
      drafted_seconds: seconds of the step with the trees as they were drafted, without drafting
      seconds_of: the same with continuations, as a function of nodes and width of the largest tree
    """
    longest = max([tree.longest for tree in trees if tree.found is not None], default=0)
    best, chosen = _gain([t.tokens for t in trees], pace * drafted_seconds), None
    ways = (False, True) if any(tree.branches for tree in trees) else (False,)
    for count in _LENGTHS:
        if count > longest:
            break
        for join in ways:
            revised = [_revised(tree, count, join, trust) for tree in trees]
            nodes = max([tree.shape.nodes for tree in revised])
            if nodes > max_nodes:
                continue
            width = max([tree.shape.width for tree in revised])
            gain = _gain([tree.tokens for tree in revised], pace * seconds_of(nodes, width))
            if gain > best:
                best, chosen = gain, revised
    return chosen


def _gain(tokens: Sequence[float], missed: float) -> float:
    return sum(tokens) / len(tokens) - missed


def _revised(tree: Revisable, longest: int, join: bool, trust: Trust) -> RevisedTree:
    """Return a tree with as many drafts as its continuation allows, at most `longest`."""
    most = min(longest, tree.longest)
    count = max([n for n in _LENGTHS if n <= most], default=0)
    if tree.found is None or count == 0:
        return RevisedTree(None, tree.shape, tree.tokens)
    found = tree.found.first(count)
    trusted = trust.of(found.kind)
    holds = [trusted * math.exp(p) for p in found.log_probs]
    shape, branches = BeamShape(1, count + 1), tree.branches if join else ()
    if branches:
        W, L, N = tree.shape.width, tree.shape.length, tree.shape.nodes
        shape = BeamShape(W + 1, max(L, count + 1), N + count)
    both = zip_longest(holds, branches, fillvalue=0.0)
    accepted = [hold + (1 - hold) * branch for hold, branch in both]
    proposal = Proposal(shape, [found], bool(branches))
    return RevisedTree(proposal, shape, 1 + sum(accepted), holds[-1])
