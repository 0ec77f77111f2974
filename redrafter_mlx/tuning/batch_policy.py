"""Policy: the beam shape that promises the most tokens per second, step by step.

Expected tokens come from the acceptance statistics, seconds from the cost model, corrected by
measured step times. Plain decoding is one of the shapes. A shape is chosen once enough steps are
evidence about it. Other shapes that seem to promise more are probed, as far as a budget pays.

The rows of a batch share one shape. It is chosen by the cost of all rows together and by the mean
number of tokens per row, so that drafting stops where a batch fills the device by itself.

Copies of the text (prompt lookup) have a policy of their own, see `copies/`.

Everything here is arithmetic on the host with the reports of earlier steps.
"""

from __future__ import annotations

import math
from collections import Counter, abc, deque

import numpy as np

from redrafter_mlx.config import PLAIN, BeamShape
from redrafter_mlx.decoding.proposal import Drafted, Proposal
from redrafter_mlx.decoding.sequence import Sequence
from redrafter_mlx.response import StepResult
from redrafter_mlx.tuning.acceptance import AcceptanceStatistics
from redrafter_mlx.tuning.candidates import candidates
from redrafter_mlx.tuning.copies.policy import CopyPolicy, ShapeInUse
from redrafter_mlx.tuning.cost_model import CostModel
from redrafter_mlx.tuning.probe_budget import ProbeBudget
from redrafter_mlx.tuning.shape_costs import ShapeCosts
from redrafter_mlx.tuning.step_times import StepTimes

_MARGIN = 0.01
"""Minimum relative gain for which another shape replaces the current one: less is noise."""

_ENOUGH = 4.0
"""Minimum number of steps with evidence about a shape before it is chosen without a probe."""

_CHANGE = 0.4
"""Minimum price of a single draft among plain steps, as a share of one: its graph is built for it
alone, and plain steps are submitted ahead only among themselves. Its own step hardly shows that."""

_SHARE, _ASSUMED_SHARE, _GAIN_SHARE = 0.015, 0.025, 0.5
"""Shares that go into the probe budget: of the time, so that probes and their other costs, such as
a change for the worse, take at most 2%; of the time while costs are assumed, so that all answers
together are slower than plain decoding by at most 3%; and then of what drafts gain over plain
steps, so that costs are soon known where drafts pay."""

_SURE_GAIN, _PLAIN_EVERY, _PLAIN_SELDOM = 1.3, 8, 64
"""While drafts promise less than _SURE_GAIN, one step in _PLAIN_EVERY is plain, otherwise one in
_PLAIN_SELDOM, until enough plain steps are timed: a profile may be wrong about one query row, whose
kernels differ from those for several. In a batch, one in _PLAIN_EVERY is, too, until enough of its
drafted steps are compared with plain ones."""

_PLAIN_AGAIN, _PLAIN_SOON = 128, 4
"""Then one in _PLAIN_AGAIN is, and one in _PLAIN_SOON after one that took another time."""

_MOST_PLAIN = 12
"""Maximum number of a batch's first steps that are plain in order to be timed. Steps that share the
device with other work are never timed, so later ones are tried too, one in _PLAIN_SELDOM."""


class BatchPolicy:
    """Chooses the shapes of one batch, step by step; a single answer is a batch of one row.

    acceptance: statistics so far; the choice is among its shapes and plain decoding
    most_rows:  rows of the largest batch so far
    seconds, steps: total time of the steps that were timed, and their number
    """

    def __init__(
        self,
        costs: CostModel,
        acceptance: AcceptanceStatistics | None = None,
        times: StepTimes | None = None,
        budget: ProbeBudget | None = None,
    ) -> None:
        self.acceptance = acceptance or AcceptanceStatistics(candidates(costs))
        self.most_rows = 1
        self.seconds, self.steps = 0.0, 0
        self.shapes = (PLAIN, *self.acceptance.shapes)
        self._biased_share = 0.0  # of the rows
        self._numbers = {shape: i for i, shape in enumerate(self.shapes)}
        self._times = times or StepTimes()
        self._costs = ShapeCosts(self.shapes, costs, self._times)
        self._budget = budget or ProbeBudget()
        self._tokens = np.ones(len(self.shapes))  # per row
        self._best = self._probed = 0  # indices of shapes
        self._plain_steps: Counter[int] = Counter()  # to be timed, by class of batch sizes
        self._probes: deque[BeamShape] = deque()  # unread
        self._stale = True
        if costs.assumed:  # until something is saved, plain steps are the ones that surely pay
            self._budget.start_empty()
        self._copies = CopyPolicy(self.acceptance, self._costs, self._times)

    def begin_answer(self) -> None:
        """Give copies that were given up another chance, for the text of an answer that joins."""
        self._copies.begin_answer()

    def propose(self, rows: abc.Sequence[Sequence]) -> Proposal:
        """Return what to draft, the same for all rows."""
        return Proposal(self._next_shape(rows))

    def _next_shape(self, rows: abc.Sequence[Sequence]) -> BeamShape:
        self._look_up_costs(max(row.committed for row in rows), len(rows))
        if self._stale:
            self._choose()
        if self._plain_first():
            return PLAIN
        if self._probed == self._best:
            return self.shapes[self._best]
        seconds = float(self._costs.seconds[self._best])
        probed = float(self._costs.seconds[self._probed])
        price = probed + self._costs.uncertain(self.shapes[self._probed].nodes, probed) - seconds
        if self._best == 0:
            price = max(price, _CHANGE * seconds)
        if not self._budget.pays(price, self._income()):
            return self.shapes[self._best]
        self._probes.append(self.shapes[self._probed])
        return self._probes[-1]

    def revise(
        self, rows: abc.Sequence[Sequence], drafted: abc.Sequence[Drafted]
    ) -> list[Proposal | None]:
        """Return the copies that gain most time over the trees as they were drafted."""
        return self._copies.plan(rows, drafted, self._in_use, self._expected)

    def may_revise(self, rows: abc.Sequence[Sequence]) -> bool:
        """Whether copies may be found in the next tokens, so that steps have to wait for those."""
        return self._copies.may_revise(rows, self._in_use)

    def learn(self, rows: abc.Sequence[Sequence], steps: abc.Sequence[StepResult]) -> None:
        """Record the results of a step, which may come some steps late."""
        if not rows:
            return
        share = sum(row.biased for row in rows) / len(rows)
        self._stale = self._stale or share != self._biased_share
        self._biased_share = share
        if (seconds := steps[0].seconds) is not None:
            self.seconds += seconds
            self.steps += 1
        if any(step.from_host for step in steps):
            self._copies.learn(rows, steps)
        else:
            self._learn_times(steps)
        for biased in (False, True):
            drafts = [
                step
                for row, step in zip(rows, steps, strict=True)
                if row.biased == biased and not step.from_host and step.shape.length > 1
            ]
            if drafts:
                self.acceptance.of(biased=biased).learn(*drafts)
                self._stale = True

    def expected_rates(self, length: int) -> dict[BeamShape, tuple[float, float]]:
        """Return each shape's expected tokens per step and per second, after `length` tokens."""
        self._look_up_costs(length, 1)
        self._tokens[1:] = self.acceptance.tokens()
        pairs = zip(self._tokens.tolist(), self._costs.seconds.tolist(), strict=True)
        return {s: (n, n / seconds) for s, (n, seconds) in zip(self.shapes, pairs, strict=True)}

    def _learn_times(self, steps: abc.Sequence[StepResult]) -> None:
        """Record the time of a step without copies, and its gain if it was a probe."""
        batch = len(steps)
        largest = max(steps, key=lambda step: step.shape.nodes)
        shape, nodes, seconds = largest.shape, largest.query_rows, largest.seconds or math.nan
        overpaid = self._overpaid(shape, seconds / self._times.of(batch).slowness())
        self._times.of(batch).learn(nodes, self._costs.predicted(shape, batch), seconds)
        self._stale = self._costs.correct() or self._stale
        if shape in self._probes:
            while self._probes.popleft() != shape:
                pass  # copies replaced the earlier probes
            gained = sum(len(step.path) for step in steps) / batch
            gained -= self._expected(self.shapes[self._best])
            self._budget.add(gained / self._in_use.pace + overpaid)

    def _choose(self) -> None:
        """Choose the best shape among those with enough evidence, and the shape to probe.

        A change of shape costs a compilation, so the shape in use stays without a clear gain, and
        the cost of an untimed shape is not trusted, except that of the one in use.
        """
        self._stale = False
        tokens, steps = self.acceptance.tokens(), self.acceptance.steps()
        if self._biased_share:
            of_biased = self.acceptance.of(biased=True)
            tokens = tokens + self._biased_share * (of_biased.tokens() - tokens)
            steps = steps + self._biased_share * (of_biased.steps() - steps)
        self._tokens[1:] = tokens
        paces = self._tokens / self._costs.seconds
        doubted = self._tokens / self._costs.highest()
        has_evidence = np.array([True, *(steps >= _ENOUGH)])
        used = self._best if has_evidence[self._best] else 0
        trusted = np.where(has_evidence, doubted, 0.0)
        trusted[used] = paces[used]
        best = int(np.argmax(trusted))
        self._best = best if trusted[best] > paces[used] * (1 + _MARGIN) else used
        for known in (self._best, self._probed):
            doubted[known] = paces[known]
        promising = int(np.argmax(doubted))
        gains = paces[promising] > paces[self._best] * (1 + _MARGIN)
        self._probed = promising if gains else self._best
        # Drafting may pay by now; what costs least is tried first where nothing is known.
        if len(paces) > 1 and self._best == 0 and (self._probed == 0 or self._costs.unknown):
            self._probed = 1 + int(np.argmin(self._costs.seconds[1:]))
            self._budget.start_empty()

    def _income(self) -> float:
        """Return the seconds that a step of the shape in use adds to the budget."""
        used, plain = self._in_use, self._costs.plain_seconds
        if not self._costs.assumed:
            return _SHARE * used.seconds
        gained = max(used.tokens * plain - used.seconds, 0.0)
        return _ASSUMED_SHARE * used.seconds + _GAIN_SHARE * gained

    def _overpaid(self, shape: BeamShape, seconds: float) -> float:
        """Return by how much the price of an uncertain shape exceeds its step's own seconds."""
        expected = float(self._costs.seconds[self._numbers.get(shape, 0)])
        uncertain = self._costs.uncertain(shape.nodes, expected)
        return 0.0 if math.isnan(seconds) or not uncertain else expected + uncertain - seconds

    def _plain_first(self) -> bool:
        """Whether to take a plain step so that it is timed, and drafts can be compared with it."""
        batch = self._costs.batch
        times = self._times.of(batch)
        if times.known(PLAIN.nodes):
            # A batch's drafted steps are uncertain until enough are compared with plain ones.
            unsure = batch > 1 and not times.known(self.shapes[self._best].nodes)
            every = _PLAIN_SOON if times.surprised() else _PLAIN_AGAIN
            return times.plain_is_due(_PLAIN_EVERY if unsure else every)
        if batch > 1:
            self._plain_steps[times.size] += 1
            return self._plain_steps[times.size] <= _MOST_PLAIN or times.plain_is_due(_PLAIN_SELDOM)
        # Even a gain that seems sure may be that of a plain step timed while the machine was busy.
        sure = self._in_use.pace >= _SURE_GAIN / self._costs.plain_seconds
        return times.plain_is_due(_PLAIN_SELDOM if sure else _PLAIN_EVERY)

    @property
    def _in_use(self) -> ShapeInUse:
        number = self._best
        tokens, seconds = float(self._tokens[number]), float(self._costs.seconds[number])
        return ShapeInUse(self.shapes[number], tokens, seconds)

    def _expected(self, shape: BeamShape) -> float:
        """Return the expected tokens per row in a step; an unknown shape is treated as plain."""
        return float(self._tokens[self._numbers.get(shape, 0)])

    def _look_up_costs(self, length: int, batch: int) -> None:
        self.most_rows = max(self.most_rows, batch)
        self._stale = self._costs.look_up(length, batch) or self._stale
