"""Policy: the beam shape that promises the most tokens per second, step by step.

Expected tokens come from the acceptance statistics, seconds from the cost model, corrected by the
times of the steps themselves. Plain decoding is one of the shapes. A shape is chosen once enough
steps have told of it. Others that seem to promise more are probed, and what probing costs is
bounded: a small share of the time goes into a budget that pays for probes. What a probe gains is
paid back, so that a probe which succeeds is followed by another at once.

Copies of the text (prompt lookup) are weighed anew at every step, by how long the match is.

Everything here is arithmetic on the host with what earlier steps have reported.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import zip_longest

import numpy as np

from redrafter_mlx.autotune.acceptance import AcceptanceStatistics
from redrafter_mlx.autotune.cost_model import CostModel
from redrafter_mlx.autotune.step_times import StepTimes
from redrafter_mlx.config import MAX_BEAM_LENGTH, PLAIN, BeamShape
from redrafter_mlx.decoding.copies import CopyPlan
from redrafter_mlx.decoding.step_result import StepResult
from redrafter_mlx.drafting.prompt_lookup import Copy, CopySource

WIDEST = 4
LENGTHS = (2, 3, 4, 5, 6, 8)
"""Only these shapes are chosen automatically."""

_NODES = (6, 8, 10, 13, 16, 20, 24, 28)
"""Trees are cut to these sizes, each about a quarter more than the one before, and at cliffs."""

_MARGIN = 0.01
"""Another shape must promise so much more than the one in use: less is noise."""

_ENOUGH = 4.0
"""So many steps must have told of a shape before it is chosen without a probe."""

_PROBE_SHARE = 0.015
"""Of the time, what goes into the budget of probes; with what else they cost, such as a change for
the worse, it is 2% at most."""

_MOST_PROBES = 3
"""Probes that the budget can hold: one that misses does not end a row of them."""

_CONTEXT_STEP = 64
"""Tokens after which costs are looked up again; they change by a few percent in 2,000 tokens."""

_COPY_LENGTHS = (1, 3, 7, 15, 31)
"""Few, because each row count is a compiled graph of its own."""

_LONG_MATCH = 8
"""Shorter matches are copied for twice their length at most, however well others have held."""

_COPY_MARGIN = 0.1
"""Tokens that a copy must promise more than the tree as it was drafted."""

_BESIDE_COPY = 0.7
"""How good a drafter's branches are where the copy beside them is wrong, as a share of how good
they are otherwise. Assumed: both tend to fail at the same positions."""


class ShapePolicy:
    """The shapes of one answer, step by step.

    acceptance: what was learned so far; its shapes and plain decoding are those to choose from
    """

    def __init__(
        self,
        costs: CostModel,
        acceptance: AcceptanceStatistics | None = None,
        times: StepTimes | None = None,
    ) -> None:
        self.acceptance = acceptance or AcceptanceStatistics(candidates(costs))
        self.shapes = (PLAIN, *self.acceptance.shapes)
        self._numbers = {shape: i for i, shape in enumerate(self.shapes)}
        self._rows = np.array([shape.nodes for shape in self.shapes])
        self._costs = costs
        self._times = times or StepTimes()
        self._context = -1
        self._predicted = np.zeros(len(self.shapes))
        self._seconds = np.zeros(len(self.shapes))  # predicted and corrected
        self._tokens = np.ones(len(self.shapes))
        self._best = self._probed = 0  # numbers of shapes
        self._budget = math.inf  # for what seems to pay: as many probes as it can hold
        self._probes: deque[BeamShape] = deque()  # not read yet
        self._stale = True
        # Of planned copies: the expected drafts, the seconds, and those of the drafting before.
        self._copied: deque[tuple[float, float, float]] = deque()

    def next_shape(self, length: int) -> BeamShape:
        """The shape to draft with after `length` tokens."""
        self._look_up_costs(length)
        if self._stale:
            self._choose()
        if self._probed == self._best:
            return self.shapes[self._best]
        seconds = float(self._seconds[self._best])
        price = float(self._seconds[self._probed]) - seconds
        self._budget = min(self._budget + _PROBE_SHARE * seconds, _MOST_PROBES * max(price, 0.0))
        if self._budget < price:
            return self.shapes[self._best]
        self._budget -= price
        self._probes.append(self.shapes[self._probed])
        return self._probes[-1]

    def plan_copies(self, source: CopySource, drafted: BeamShape, drawn: bool) -> CopyPlan | None:
        """The copy whose verification gains most time over the tree as it was drafted."""
        costs, copies = self._costs, self.acceptance.copies
        found = source.copies(1, min(MAX_BEAM_LENGTH, costs.most_rows) - 1)
        if not found:
            return None
        (copy,) = found
        holds = [copies.trust * math.exp(p) for p in copy.log_probs]
        joins = drafted != PLAIN and not drawn
        branches = self.acceptance.accepted_by_depth(drafted) if joins else []
        pace, drafting = self._pace(self._best), self._drafting(drafted)
        best = self._expected(drafted) - pace * (self._step_seconds(drafted) - drafting)
        best += _COPY_MARGIN
        chosen: tuple[int, bool, float] | None = None
        most = 2 * copy.matched if copy.matched < _LONG_MATCH else len(holds)
        for count in (n for n in _COPY_LENGTHS if n <= min(most, len(holds))):
            for joined in (False, True) if joins else (False,):
                rows = count + (drafted.nodes if joined else 1)
                if rows > costs.most_rows:
                    continue
                seconds = costs.verify(rows, self._context * _CONTEXT_STEP)
                seconds += costs.overhead(drafted.width + 1 if joined else 1)
                tokens = 1 + _accepted(holds[:count], branches if joined else [])
                gain = tokens - pace * copies.cost * seconds
                if gain > best:
                    best, chosen = gain, (count, joined, seconds)
        if chosen is None:
            return None
        count, joined, seconds = chosen
        cut = Copy(copy.tokens[:count], copy.log_probs[:count], copy.matched)
        self._copied.append((cut.expected, seconds, drafting))
        if not joined:
            draft_after = self._draft_after(holds[count - 1])
            return CopyPlan([cut], BeamShape(1, count + 1), False, draft_after)
        width, length = drafted.width + 1, max(drafted.length, count + 1)
        return CopyPlan([cut], BeamShape(width, length, drafted.nodes + count), True)

    def learn(self, step: StepResult) -> None:
        """Take note of a step that was read; they may come some steps late."""
        if step.copied:
            expected, seconds, drafting = self._copied.popleft()
            # The cost model is off by about as much for other steps.
            cost = (step.seconds / self._times.slowness - drafting) / seconds
            self.acceptance.copies.learn(expected, len(step.path) - 1, cost)
            return
        self._times.learn(step.rows, self._predict(step.shape), step.seconds)
        self._correct(step.rows)
        if step.shape.length == 1:
            return
        if step.shape in self._probes:
            while self._probes.popleft() != step.shape:
                pass  # those before it gave way to copies
            gained = len(step.path) - self._expected(self.shapes[self._best])
            self._budget += gained / self._pace(self._best)
        self.acceptance.learn(step)
        self._stale = True

    def promises(self, length: int) -> dict[BeamShape, tuple[float, float]]:
        """Tokens a step and tokens a second that each shape promises after `length` tokens."""
        self._look_up_costs(length)
        self._tokens[1:] = self.acceptance.tokens()
        pairs = zip(self._tokens.tolist(), (self._tokens / self._seconds).tolist(), strict=True)
        return dict(zip(self.shapes, pairs, strict=True))

    def _choose(self) -> None:
        """The best shape among those that are known well enough, and of the others a better one."""
        self._stale = False
        self._tokens[1:] = self.acceptance.tokens()
        paces = self._tokens / self._seconds
        known = np.ones(len(paces), bool)
        known[1:] = self.acceptance.steps() >= _ENOUGH
        if not known[self._best]:
            self._best = 0
        best = int(np.argmax(np.where(known, paces, 0.0)))
        if paces[best] > paces[self._best] * (1 + _MARGIN):
            self._best = best
        self._probed = int(np.argmax(paces))
        if paces[self._probed] <= paces[self._best] * (1 + _MARGIN):
            self._probed = self._best
        if self._best == self._probed == 0 and len(paces) > 1:  # drafting may have begun to pay
            self._probed = 1 + int(np.argmin(self._seconds[1:]))
            self._budget = 0.0 if self._budget == math.inf else self._budget

    def _draft_after(self, holds: float) -> bool:
        """Whether to draft for the step after a copy that holds throughout with that chance.

        If it does, the match is longer and the next step copies again: the drafts are in vain.
        """
        best = self.shapes[self._best]
        if best == PLAIN:
            return True  # nothing is drafted anyhow, or it is a probe, which was paid for
        drafting, pace = self._drafting(best), self._pace(self._best)
        dearer = float(self._seconds[self._best] - self._seconds[0]) - drafting
        gain = self._expected(best) - 1 - pace * dearer
        return (1 - holds) * gain > pace * drafting

    def _expected(self, shape: BeamShape) -> float:
        """Tokens of a step; a shape that is no candidate counts as plain."""
        return float(self._tokens[self._numbers.get(shape, 0)])

    def _pace(self, number: int) -> float:
        """Tokens a second."""
        return float(self._tokens[number] / self._seconds[number])

    def _drafting(self, shape: BeamShape) -> float:
        return self._costs.drafting(shape.width, shape.length)

    def _predict(self, shape: BeamShape) -> float:
        """Seconds of a step by the cost model alone."""
        number = self._numbers.get(shape)
        if number is None:
            return self._costs.step(shape, self._context * _CONTEXT_STEP)
        return float(self._predicted[number])

    def _step_seconds(self, shape: BeamShape) -> float:
        """The same, corrected."""
        return self._predict(shape) * self._times.correction(shape.nodes)

    def _correct(self, rows: int) -> None:
        """Take note of what steps with so many query rows take."""
        there = self._rows == rows
        corrected = self._predicted[there] * self._times.correction(rows)
        self._stale = self._stale or not np.array_equal(corrected, self._seconds[there])
        self._seconds[there] = corrected

    def _look_up_costs(self, length: int) -> None:
        context = length // _CONTEXT_STEP
        if context != self._context:
            self._context = context
            self._predicted = np.array([self._costs.step(s, length) for s in self.shapes])
            self._stale = True
            for rows in set(self._rows.tolist()):
                self._correct(rows)


def _accepted(holds: list[float], branches: list[float]) -> float:
    """Expected accepted drafts of a copy and of the drafter's branches in one tree."""
    both = zip_longest(holds, branches, fillvalue=0.0)
    return sum(hold + (1 - hold) * _BESIDE_COPY * branch for hold, branch in both)


def candidates(
    costs: CostModel, widest: int = WIDEST, longest: int = LENGTHS[-1]
) -> tuple[BeamShape, ...]:
    """The few shapes worth a choice on this machine, plain decoding aside.

    Every width and length whose drafting has a cost, whole, and cut to a ladder of row counts and
    at cliffs, with room for a draft of each beam: a beam that no node is left for only costs. A
    shape is left out when a larger one costs no more at either context: it would never be better.
    """
    widest = min(widest, WIDEST, max((w for w, *_ in costs.draft), default=0))
    longest = min(longest, max((n for _, n, _ in costs.draft), default=0))
    cuts = sorted({*_NODES, *costs.cliffs()})
    found = set()
    for width in range(1, widest + 1):
        for length in (n for n in LENGTHS if n <= longest):
            full = width * (length - 1) + 1
            for nodes in (full, *(n for n in cuts if max(length, full // 3) <= n < full)):
                if width < nodes <= costs.most_rows:
                    found.add(BeamShape(width, length, nodes))
    shapes = sorted(found, key=lambda s: (s.nodes, s.length, s.width))
    contexts = (costs.short_context, costs.long_context)
    # What a larger shape has more of is positive here, and what it costs less of too.
    sizes = np.array(
        [(s.width, s.length, s.nodes, *(-costs.step(s, c) for c in contexts)) for s in shapes]
    ).reshape(-1, 5)
    no_worse = np.all(sizes[:, None] >= sizes[None], axis=2)  # [other, shape]
    np.fill_diagonal(no_worse, False)
    return tuple(s for s, beaten in zip(shapes, no_worse.any(axis=0), strict=True) if not beaten)
