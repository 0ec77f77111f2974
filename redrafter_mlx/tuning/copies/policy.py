"""Policy of copies: those of each step, planned by the length of the matches, and their results."""

from __future__ import annotations

import math
from collections import abc, deque
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from redrafter_mlx.config import MAX_BEAM_LENGTH, PLAIN, BeamShape
from redrafter_mlx.decoding import proposal
from redrafter_mlx.decoding.prefix_cache import common_prefix
from redrafter_mlx.decoding.proposal import Proposal
from redrafter_mlx.decoding.sequence import Sequence
from redrafter_mlx.drafting.continuation import Continuation
from redrafter_mlx.response import StepResult
from redrafter_mlx.tuning.acceptance import AcceptanceStatistics
from redrafter_mlx.tuning.copies.choice import CopyTree, Drafted, best_copies
from redrafter_mlx.tuning.shape_costs import ShapeCosts
from redrafter_mlx.tuning.step_times import StepTimes


class ShapeInUse(NamedTuple):
    """The shape of a batch's steps without copies.

    tokens:  expected tokens per row in a step
    seconds: of a step
    """

    shape: BeamShape
    tokens: float
    seconds: float

    @property
    def pace(self) -> float:
        """Tokens per second of a row."""
        return self.tokens / self.seconds


class _Planned(NamedTuple):
    """Planned copies by row, and what is predicted of their step.

    nodes:   of the step's largest tree
    drafted: the largest shape that was drafted before
    """

    copies: dict[Sequence, Continuation]
    nodes: int
    seconds: float
    drafted: BeamShape


class CopyPolicy:
    """Plans the copies in the steps of one batch."""

    def __init__(
        self, acceptance: AcceptanceStatistics, costs: ShapeCosts, times: StepTimes
    ) -> None:
        self._acceptance, self._costs, self._times = acceptance, costs, times
        self._planned: deque[_Planned] = deque()  # unread

    def begin_answer(self) -> None:
        """Give copies that were given up another chance, for the text of an answer that joins."""
        self._acceptance.copies.begin_answer()
        if self._acceptance.biased is not None:
            self._acceptance.biased.copies.begin_answer()

    def plan(
        self,
        rows: abc.Sequence[Sequence],
        drafted: abc.Sequence[proposal.Drafted],
        used: ShapeInUse,
        expected: Callable[[BeamShape], float],
    ) -> list[Proposal | None]:
        """Return the copies that gain most time over the trees as they were drafted.

        Args:
          drafted: how each sequence's drafts were made
          expected: returns the expected tokens of a shape
        """
        found = [
            self._drafted(row, made, expected(made.shape))
            for row, made in zip(rows, drafted, strict=True)
        ]
        largest = max((made.shape for made in drafted), key=lambda shape: shape.nodes)
        choice = self._best(rows, found, largest, used.pace)
        if choice is None:
            return [None] * len(rows)
        trees, seconds = choice
        plans = [tree.plan for tree in trees]
        copies = {row: plan.continuations[0] for row, plan in zip(rows, plans, strict=True) if plan}
        nodes = max(tree.shape.nodes for tree in trees)
        self._planned.append(_Planned(copies, nodes, seconds, largest))
        after = self._draft_after([tree.holds for tree in trees], used)
        return [plan and replace(plan, draft_after=plan.join or after) for plan in plans]

    def may_revise(self, rows: abc.Sequence[Sequence], used: ShapeInUse) -> bool:
        """Whether the longest matches that the next tokens can complete would be copied.

        Otherwise plain steps need not wait for those tokens. A shorter match is less often right.
        """
        longest, found = self._longest, []
        for row in rows:
            found.append(Drafted(row.next_continuation(longest), PLAIN, [], 1.0))
        return self._best(rows, found, PLAIN, used.pace) is not None

    def learn(self, rows: abc.Sequence[Sequence], steps: abc.Sequence[StepResult]) -> None:
        """Record the results of a step in which some rows had copies."""
        planned, cost = self._result(rows, steps)
        for biased in (False, True):
            copied = [
                (planned.copies[row], step)
                for row, step in zip(rows, steps, strict=True)
                if step.from_host and row.biased == biased
            ]
            if not copied:
                continue
            known = self._acceptance.of(biased=biased).copies
            known.learn_cost(planned.nodes, cost)
            for copy, step in copied:
                n, right = len(copy.tokens), common_prefix(copy.tokens, step.tokens)
                known.learn(copy.matched, copy.expected / n, right / n)

    def _result(
        self, rows: abc.Sequence[Sequence], steps: abc.Sequence[StepResult]
    ) -> tuple[_Planned, float]:
        """Return what was planned for a step, and its time as a share of the predicted one."""
        copied = [row for row, step in zip(rows, steps, strict=True) if step.from_host]
        planned = self._planned.popleft()
        while not all(row in planned.copies for row in copied):
            planned = self._planned.popleft()  # all rows of that plan have ended
        # The cost model is off for this step by about as much as for others.
        seconds = (steps[0].seconds or math.nan) / self._times.of(len(rows)).slowness()
        seconds -= self._costs.drafting(planned.drafted, len(rows))
        return planned, seconds / planned.seconds

    def _best(
        self,
        rows: abc.Sequence[Sequence],
        found: abc.Sequence[Drafted],
        largest: BeamShape,
        pace: float,
    ) -> tuple[list[CopyTree], float] | None:
        """Return the best copies over trees of at most the largest shape; None if none gain."""
        if not any(row.match for row in found):
            return None
        biased = not any(not row.biased for row in rows)
        return best_copies(
            found,
            self._acceptance.of(biased=biased).copies,
            pace,
            self._costs.without_drafting(largest),
            self._costs.verification,
            self._costs.doubt,
            self._costs.most_nodes,
        )

    @property
    def _longest(self) -> int:
        """Maximum number of drafts in a copy."""
        return min(MAX_BEAM_LENGTH, self._costs.most_nodes) - 1

    def _drafted(self, row: Sequence, made: proposal.Drafted, tokens: float) -> Drafted:
        """Return what copies may replace or join in a row."""
        found, shape = row.continuations(1, self._longest), made.shape
        known = self._acceptance.of(biased=row.biased)
        branches = known.accepted_by_depth(shape) if found and made.joinable else []
        return Drafted(found[0] if found else None, shape, branches, tokens)

    def _draft_after(self, holds: abc.Sequence[float], used: ShapeInUse) -> bool:
        """Whether to draft for the step after copies; `holds` are their chances of full acceptance.

        After a fully accepted copy, the match is longer and the next step copies again: drafts
        would be wasted.
        """
        if used.shape == PLAIN:
            return True  # nothing is drafted, or it is a probe, which was paid for
        drafting = self._costs.drafting(used.shape, self._costs.batch)
        extra = used.seconds - self._costs.plain_seconds - drafting
        gain = used.tokens - 1 - used.pace * extra
        return (1 - sum(holds) / len(holds)) * gain > used.pace * drafting
