"""Policy: the beam shape that promises the most tokens per second, step by step.

Expected tokens come from the acceptance statistics, seconds from the cost model, corrected by the
times of the steps themselves. Plain decoding is one of the shapes. A shape is chosen once enough
steps have told of it. Others that seem to promise more are probed, and what probing costs is
bounded: a small share of the time goes into a budget that pays for probes. What a probe gains is
paid back, so that a probe which succeeds is followed by another at once.

The rows of a batch share one shape. It is chosen by what all rows together cost and by the tokens
that a row gets on average, so that drafts end where a batch fills the device by itself.

Copies of the text (prompt lookup) are weighed anew at every step, by how long the matches are.

Everything here is arithmetic on the host with what earlier steps have reported.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from copy import deepcopy

import numpy as np
from numpy.typing import NDArray

from redrafter_mlx.autotune.acceptance import AcceptanceStatistics
from redrafter_mlx.autotune.candidates import candidates
from redrafter_mlx.autotune.copy_choice import Drafted, best_copies
from redrafter_mlx.autotune.cost_model import CostModel
from redrafter_mlx.autotune.step_times import StepTimes
from redrafter_mlx.config import MAX_BEAM_LENGTH, PLAIN, BeamShape
from redrafter_mlx.decoding.copies import CopyPlan
from redrafter_mlx.decoding.row import Row
from redrafter_mlx.decoding.step_result import StepResult
from redrafter_mlx.drafting.prompt_lookup import Copy

_MARGIN = 0.01
"""Another shape must promise so much more than the one in use: less is noise."""

_ENOUGH = 4.0
"""So many steps must have told of a shape before it is chosen without a probe."""

_PROBE_SHARE = 0.015
"""Of the time, what goes into the budget of probes; with what else they cost, such as a change for
the worse, it is 2% at most."""

_MOST_PROBES = 3
"""Probes that the budget can hold: one that misses does not end a row of them."""

_UNTIMED = 1.2
"""Until some were timed, drafted steps of a batch count as so much dearer than the cost model says,
which adds up calls that were timed for one tree: they are probed, not chosen for a small gain."""

_SURE_GAIN, _PLAIN_EVERY = 1.3, 8
"""Where drafts promise a smaller gain, one step in so many is plain until enough of those were
timed: a profile may be wrong about one row, which takes other kernels than several."""

_CONTEXT_STEP = 64
"""Tokens after which costs are looked up again; they change by a few percent in 2,000 tokens."""


class BatchPolicy:
    """The shapes of one batch, step by step; an answer alone is a batch of one row.

    acceptance: what was learned so far; its shapes and plain decoding are those to choose from
    times:      what steps took
    most_rows:  the largest batch so far
    """

    def __init__(
        self,
        costs: CostModel,
        acceptance: AcceptanceStatistics | None = None,
        times: StepTimes | None = None,
    ) -> None:
        self.acceptance = acceptance or AcceptanceStatistics(candidates(costs))
        self.most_rows = 1
        self.shapes = (PLAIN, *self.acceptance.shapes)
        self._of_biased: AcceptanceStatistics | None = None
        self._biased = 0.0  # the share of rows that are
        self._numbers = {shape: i for i, shape in enumerate(self.shapes)}
        nodes = [shape.nodes for shape in self.shapes]
        self._counts, self._of_count = np.unique(nodes, return_inverse=True)
        self._costs = costs
        self.times = times or StepTimes()
        self._context, self._batch = -1, 1
        self._predicted = np.zeros(len(self.shapes))
        self._seconds = np.zeros(len(self.shapes))  # predicted and corrected
        self._tokens = np.ones(len(self.shapes))  # of a row
        self._best = self._probed = 0  # numbers of shapes
        self._untimed = 0  # steps that promised little beside plain ones that were not timed
        self._budget = math.inf  # for what seems to pay: as many probes as it can hold
        self._probes: deque[BeamShape] = deque()  # not read yet
        self._stale = True
        # Of planned copies, the seconds of the step, and the largest shape drafted before.
        self._copied: deque[tuple[Mapping[Row, Copy], float, BeamShape]] = deque()

    def next_shape(self, rows: Sequence[Row]) -> BeamShape:
        """The shape to draft with, the same for all rows."""
        self._look_up_costs(max(row.committed for row in rows), len(rows))
        if self._stale:
            self._choose()
        if self._plain_first():
            return PLAIN
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

    def plan_copies(
        self, rows: Sequence[Row], drafted: Sequence[BeamShape], drawn: Sequence[bool]
    ) -> list[CopyPlan | None]:
        """The copies whose verification gains most time over the trees as they were drafted."""
        trees = [
            self._drafted(row, shape, was_drawn)
            for row, shape, was_drawn in zip(rows, drafted, drawn, strict=True)
        ]
        if not any(tree.match for tree in trees):
            return [None] * len(rows)
        largest = max(drafted, key=lambda shape: shape.nodes)
        biased = not any(row.learns for row in rows)
        choice = best_copies(
            trees,
            self._statistics(biased).copies,
            self._pace(self._best),
            self._step_seconds(largest) - self._drafting(largest, self._batch),
            self._verification,
            self._costs.most_nodes,
        )
        if choice is None:
            return [None] * len(rows)
        copies = {row: copy for row, copy in zip(rows, choice.copies, strict=True) if copy}
        self._copied.append((copies, choice.seconds, largest))
        return choice.plans(self._draft_after(choice.holds))

    def learn(self, rows: Sequence[Row], steps: Sequence[StepResult]) -> None:
        """Take note of a step that was read; they may come some steps late."""
        if not rows:
            return
        biased = sum(not row.learns for row in rows) / len(rows)
        self._stale = self._stale or biased != self._biased
        self._biased = biased
        both = list(zip(rows, steps, strict=True))
        if any(step.copied for step in steps):
            self._learn_copies([(row, step) for row, step in both if step.copied], len(rows))
        else:
            self._learn_times(steps)
        drafts = [(row, step) for row, step in both if not step.copied and step.shape.length > 1]
        for learns in (True, False):
            of_kind = [step for row, step in drafts if row.learns == learns]
            if of_kind:
                self._statistics(not learns).learn(*of_kind)
                self._stale = True

    def promises(self, length: int) -> dict[BeamShape, tuple[float, float]]:
        """Tokens a step and tokens a second that each shape promises after `length` tokens."""
        self._look_up_costs(length, 1)
        self._tokens[1:] = self.acceptance.tokens()
        pairs = zip(self._tokens.tolist(), (self._tokens / self._seconds).tolist(), strict=True)
        return dict(zip(self.shapes, pairs, strict=True))

    def _learn_times(self, steps: Sequence[StepResult]) -> None:
        """What a step without copies took, and what it brought if it was a probe."""
        batch = len(steps)
        largest = max(steps, key=lambda step: step.shape.nodes)
        shape, nodes = largest.shape, largest.rows
        self.times.learn(nodes, self._predict(shape, batch), largest.seconds, batch)
        self._correct()
        if shape in self._probes:
            while self._probes.popleft() != shape:
                pass  # those before it gave way to copies
            gained = sum(len(step.path) for step in steps) / batch
            gained -= self._expected(self.shapes[self._best])
            self._budget += gained / self._pace(self._best)

    def _learn_copies(self, copied: Sequence[tuple[Row, StepResult]], batch: int) -> None:
        """How copies fared in the rows that had any."""
        copies, predicted, drafted = self._copied.popleft()
        while not all(row in copies for row, _ in copied):
            copies, predicted, drafted = self._copied.popleft()  # all its rows ended before
        # The cost model is off by about as much for other steps.
        seconds = copied[0][1].seconds / self.times.slowness(batch)
        seconds -= self._drafting(drafted, batch)
        for learns in (True, False):
            of_kind = [(row, step) for row, step in copied if row.learns == learns]
            if of_kind:
                expected = sum(copies[row].expected for row, _ in of_kind)
                accepted = sum(len(step.path) - 1 for _, step in of_kind)
                of_copies = self._statistics(not learns).copies
                of_copies.learn(expected, accepted, seconds / predicted)

    def _drafted(self, row: Row, shape: BeamShape, drawn: bool) -> Drafted:
        """What copies may replace or join in a row."""
        longest = min(MAX_BEAM_LENGTH, self._costs.most_nodes) - 1
        found = [] if row.index is None else row.index.copies(1, longest)
        joins = shape != PLAIN and not drawn
        branches = self.acceptance.accepted_by_depth(shape) if found and joins else []
        return Drafted(found[0] if found else None, shape, branches, self._expected(shape))

    def _statistics(self, biased: bool) -> AcceptanceStatistics:
        """Of rows whose target a grammar or penalties change: they tell nothing of the others."""
        if not biased:
            return self.acceptance
        if self._of_biased is None:
            self._of_biased = deepcopy(self.acceptance)
        return self._of_biased

    def _choose(self) -> None:
        """The best shape among those that are known well enough, and of the others a better one."""
        self._stale = False
        tokens, steps = self.acceptance.tokens(), self.acceptance.steps()
        if self._biased:
            of_biased = self._statistics(biased=True)
            tokens = tokens + self._biased * (of_biased.tokens() - tokens)
            steps = steps + of_biased.steps()
        self._tokens[1:] = tokens
        paces = self._tokens / self._seconds
        known = np.ones(len(paces), bool)
        known[1:] = steps >= _ENOUGH
        if not known[self._best]:
            self._best = 0
        sure = self._timed()
        sure[self._best] = True  # each change of the shape is compiled: only for a clear gain
        safe = paces / np.where(sure, 1.0, _UNTIMED)
        best = int(np.argmax(np.where(known, safe, 0.0)))
        if safe[best] > safe[self._best] * (1 + _MARGIN):
            self._best = best
        promised = np.where(sure, paces, paces / _UNTIMED)
        promised[self._probed] = paces[self._probed]
        self._probed = int(np.argmax(promised))
        if paces[self._probed] <= paces[self._best] * (1 + _MARGIN):
            self._probed = self._best
        if self._best == self._probed == 0 and len(paces) > 1:  # drafting may have begun to pay
            self._probed = 1 + int(np.argmin(self._seconds[1:]))
            self._budget = 0.0 if self._budget == math.inf else self._budget

    def _timed(self) -> NDArray[np.bool_]:
        """Of each shape, whether its cost is sure: its steps were timed, or it has one row."""
        if self._batch == 1:
            return np.ones(len(self.shapes), bool)
        counts = self._counts.tolist()
        timed = [n == PLAIN.nodes or self.times.known(n, self._batch) for n in counts]
        return np.array(timed)[self._of_count]

    def _plain_first(self) -> bool:
        """Whether this step is plain to time it, so that drafts can be weighed against it."""
        if self.times.known(PLAIN.nodes, self._batch):
            return False
        if self._batch > 1:
            return True
        self._untimed += self._pace(self._best) < _SURE_GAIN * self._pace(0)
        return self._untimed > 0 and self._untimed % _PLAIN_EVERY == 0

    def _draft_after(self, holds: Sequence[float]) -> bool:
        """Whether to draft for the step after copies that hold throughout with those chances.

        Where one does, the match is longer and the next step copies again: drafts are in vain.
        """
        best = self.shapes[self._best]
        if best == PLAIN:
            return True  # nothing is drafted anyhow, or it is a probe, which was paid for
        drafting, pace = self._drafting(best, self._batch), self._pace(self._best)
        dearer = float(self._seconds[self._best] - self._seconds[0]) - drafting
        gain = self._expected(best) - 1 - pace * dearer
        return (1 - sum(holds) / len(holds)) * gain > pace * drafting

    def _verification(self, nodes: int, width: int) -> float:
        """Seconds of a step that drafts nothing."""
        context = self._context * _CONTEXT_STEP
        return self._costs.verify(nodes, context, self._batch) + self._costs.overhead(width)

    def _expected(self, shape: BeamShape) -> float:
        """Tokens of a row in a step; a shape that is no candidate counts as plain."""
        return float(self._tokens[self._numbers.get(shape, 0)])

    def _pace(self, number: int) -> float:
        """Tokens a second of a row."""
        return float(self._tokens[number] / self._seconds[number])

    def _drafting(self, shape: BeamShape, batch: int) -> float:
        return self._costs.drafting(shape.width, shape.length, batch)

    def _predict(self, shape: BeamShape, batch: int) -> float:
        """Seconds of a step by the cost model alone."""
        number = self._numbers.get(shape)
        if number is None or batch != self._batch:
            return self._costs.step(shape, self._context * _CONTEXT_STEP, batch)
        return float(self._predicted[number])

    def _step_seconds(self, shape: BeamShape) -> float:
        """The same, corrected."""
        return self._predict(shape, self._batch) * self.times.correction(shape.nodes, self._batch)

    def _correct(self) -> None:
        """Take note of what steps took."""
        factors = [self.times.correction(n, self._batch) for n in self._counts.tolist()]
        seconds = self._predicted * np.array(factors)[self._of_count]
        self._stale = self._stale or not np.array_equal(seconds, self._seconds)
        self._seconds = seconds

    def _look_up_costs(self, length: int, batch: int) -> None:
        context = length // _CONTEXT_STEP
        if (context, batch) != (self._context, self._batch):
            self._context, self._batch = context, batch
            self.most_rows = max(self.most_rows, batch)
            self._predicted = np.array([self._costs.step(s, length, batch) for s in self.shapes])
            self._stale = True
            self._correct()
