"""Policy: the proposal that promises the most tokens per second, step by step.

Expected tokens come from the acceptance statistics, seconds from the cost model, corrected by what
steps take. Plain decoding is one of the shapes. A shape is chosen once enough steps are evidence
about it. Other shapes that seem to promise more are probed, as far as a budget pays. Continuations
that the host finds after reading replace the drafts, or join them, where they promise more.

The sequences of a batch share one shape. It is chosen by the cost of all of them together and by
the mean number of tokens of each, so that drafting stops where a batch fills the device by itself.

Everything here is arithmetic on the host with the reports of earlier steps.
"""

from __future__ import annotations

import math
from collections import abc, deque
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from redrafter_mlx.config import MAX_BEAM_LENGTH, PLAIN, BeamShape
from redrafter_mlx.decoding.prefix_cache import common_prefix
from redrafter_mlx.decoding.proposal import Drafted, Proposal
from redrafter_mlx.decoding.sequence import Sequence
from redrafter_mlx.drafting.continuation import Continuation
from redrafter_mlx.response import StepResult
from redrafter_mlx.tuning.acceptance import AcceptanceStatistics
from redrafter_mlx.tuning.budget import ProbeBudget
from redrafter_mlx.tuning.candidates import candidates
from redrafter_mlx.tuning.corrections import Corrections, kind_of
from redrafter_mlx.tuning.cost import CostModel
from redrafter_mlx.tuning.revision import Revisable, RevisedTree, best_revision
from redrafter_mlx.tuning.shape_costs import ShapeCosts

_MARGIN = 0.01
"""Minimum relative gain for which another shape replaces the current one: less is noise
(test_a_small_gain_is_not_worth_a_change)."""

_ENOUGH = 3.0
"""Minimum number of steps with evidence about a shape before it is chosen without a probe."""

_SHARE, _ASSUMED_SHARE, _GAIN_SHARE = 0.015, 0.025, 0.5
"""Shares that go into the probe budget: of the time, so that probes and their other costs take at
most 2% (test_shape); of the time while costs are assumed, so that no answer is slower by over 3%
(test_first_answers); and then of what drafts gain over plain steps."""

_PLAIN_EVERY, _PLAIN_SELDOM = 8, 128
"""One in so many steps is plain, so that drafts are compared with it: until the correction of the
chosen shape is known, and from then on (test_step_times)."""

_UNSURE_DRAFTS = 3
"""Maximum number of drafts of a continuation with a limit, while it is not known what such a step
takes: a wrong one with more can cost several plain steps, a tenth of a short answer
(test_copies_are_short_until_it_is_known_what_they_take)."""


class _Revised(NamedTuple):
    """A step with continuations: those by sequence, and what is predicted of it."""

    found: dict[Sequence, Continuation]
    kind: int
    seconds: float


class TunedPolicy:
    """Chooses the proposals of one batch, step by step; a single answer is a batch of one.

    acceptance: statistics so far; the choice is among its shapes and plain decoding
    """

    def __init__(
        self,
        costs: CostModel,
        acceptance: AcceptanceStatistics | None = None,
        corrections: Corrections | None = None,
        budget: ProbeBudget | None = None,
    ) -> None:
        """Without a `budget` it begins with none if costs are assumed, otherwise with a full one.

        So each answer with assumed costs saves for its own probes, and a short one tries nothing.
        """
        self.acceptance = acceptance or AcceptanceStatistics(candidates(costs))
        self.shapes = (PLAIN, *self.acceptance.shapes)
        self._proposals = [Proposal(shape) for shape in self.shapes]
        self._numbers = {shape: i for i, shape in enumerate(self.shapes)}
        self._corrections = corrections or Corrections()
        self._costs = ShapeCosts(self.shapes, costs, self._corrections)
        self._budget = budget or ProbeBudget(0.0 if costs.assumed else math.inf)
        self._longest = min(MAX_BEAM_LENGTH, costs.max_nodes) - 1  # continuation
        self._biased_share = 0.0  # of the sequences
        self._tokens = np.ones(len(self.shapes))  # of a sequence
        self._best = self._probed = 0  # indices of shapes
        self._price = self._most = self._income = 0.0
        self._probes: deque[tuple[BeamShape, float]] = deque()  # unread, and the most they may take
        self._revisions: deque[_Revised] = deque()  # unread
        self._stale = True

    def begin_answer(self) -> None:
        """Give continuations that were given up another chance, for the text of a new answer."""
        self._corrections.begin_answer()
        self.acceptance.trust.begin_answer()
        if self.acceptance.biased is not None:
            self.acceptance.biased.trust.begin_answer()

    def propose(self, sequences: abc.Sequence[Sequence]) -> Proposal:
        """Return what to draft, the same for all sequences."""
        self._look_up(max([one.committed for one in sequences]), len(sequences))
        if self._stale:
            self._choose()
        settled = self._costs.times.settled(self._costs.rows[self._best])
        if self._costs.times.plain_is_due(_PLAIN_SELDOM if settled else _PLAIN_EVERY):
            return self._proposals[0]
        if self._probed == self._best or not self._budget.pays(self._price, self._income):
            return self._proposals[self._best]
        self._probes.append((self.shapes[self._probed], self._most))
        return self._proposals[self._probed]

    def revise(
        self, sequences: abc.Sequence[Sequence], drafted: abc.Sequence[Drafted]
    ) -> list[Proposal | None]:
        """Return the continuations that gain most time over the trees as they were drafted."""
        found = [one.continuations(1, self._longest) for one in sequences]
        if not any(found):
            return [None] * len(sequences)
        trees = []
        for one, best, made in zip(sequences, found, drafted, strict=True):
            known = self.acceptance.of(biased=one.biased)
            branches = known.accepted_by_depth(made.shape) if best and made.joinable else []
            trees.append(self._revisable(best[0] if best else None, made.shape, branches))
        largest = max([made.shape for made in drafted], key=lambda shape: shape.nodes)
        revised = self._best_revision(sequences, trees, largest)
        if revised is None:
            return [None] * len(sequences)
        pairs = zip(sequences, revised, strict=True)
        continued = {one: tree.proposal.continuations[0] for one, tree in pairs if tree.proposal}
        nodes = max([tree.shape.nodes for tree in revised])
        seconds = self._costs.after_reading(nodes, max([tree.shape.width for tree in revised]))
        seconds += self._costs.drafting(largest)
        self._revisions.append(_Revised(continued, kind_of(nodes, waited=True), seconds))
        after = self._draft_after(revised)
        proposals = [tree.proposal for tree in revised]
        return [made and replace(made, draft_after=made.join or after) for made in proposals]

    def may_revise(self, sequences: abc.Sequence[Sequence]) -> bool:
        """Whether the longest matches that the next tokens can complete would be verified.

        Otherwise plain steps need not wait for those tokens. A shorter match is less often right.
        """
        found = [one.next_continuation(self._longest) for one in sequences]
        if not any(found):
            return False
        trees = [self._revisable(one, PLAIN, []) for one in found]
        return self._best_revision(sequences, trees, PLAIN) is not None

    def learn(self, sequences: abc.Sequence[Sequence], steps: abc.Sequence[StepResult]) -> None:
        """Record the results of a step, which may come some steps late."""
        if not sequences:
            return
        biased = [one.biased for one in sequences]
        share = sum(biased) / len(biased)
        self._stale = self._stale or share != self._biased_share
        self._biased_share = share
        if any(step.from_host for step in steps):
            self._learn_revision(sequences, steps)
        else:
            self._learn_time(steps)
        for of in (False, True) if any(biased) else (False,):
            drafts = [
                step
                for step, this in zip(steps, biased, strict=True)
                if this == of and not step.from_host and step.shape.length > 1
            ]
            if drafts:
                self.acceptance.of(biased=of).learn(*drafts)
                self._stale = True

    def expected_rates(self, length: int) -> dict[BeamShape, tuple[float, float]]:
        """Return each shape's expected tokens per step and per second, after `length` tokens."""
        self._look_up(length, 1)
        self._choose()
        pairs = zip(self._tokens.tolist(), self._costs.seconds.tolist(), strict=True)
        return {s: (n, n / seconds) for s, (n, seconds) in zip(self.shapes, pairs, strict=True)}

    def _look_up(self, length: int, batch: int) -> None:
        self._stale = self._costs.look_up(length, batch) or self._stale

    def _choose(self) -> None:
        """Choose the best shape among those with enough evidence, and the shape to probe.

        A change of shape costs a compilation, so the shape in use stays without a clear gain.
        """
        self._stale, costs = False, self._costs
        tokens, steps = self.acceptance.tokens(), self.acceptance.steps()
        if self._biased_share:
            of_biased = self.acceptance.of(biased=True)
            tokens = tokens + self._biased_share * (of_biased.tokens() - tokens)
            steps = steps + self._biased_share * (of_biased.steps() - steps)
        self._tokens[1:] = tokens
        costs.correct()
        paces = self._tokens / costs.seconds
        trusted = paces / costs.doubts
        trusted[1:][steps < _ENOUGH] = 0.0
        used = self._best if trusted[self._best] else 0
        trusted[used] = paces[used]
        best = int(trusted.argmax())
        self._best = best if trusted[best] > paces[used] * (1 + _MARGIN) else used
        promising = int(paces.argmax())
        gains = paces[promising] > paces[self._best] * (1 + _MARGIN)
        self._probed = promising if gains else self._best
        # Drafting may pay by now; what costs least is tried first where nothing is known.
        if len(paces) > 1 and self._best == 0 and (self._probed == 0 or costs.unknown):
            self._probed = 1 + int(costs.seconds[1:].argmin())
            self._budget.start_empty()
        used_seconds = float(costs.seconds[self._best])
        self._most = costs.most(self._probed)
        self._price = costs.price(self._probed, self._best)
        self._income = _SHARE * used_seconds
        if costs.assumed:
            gain = float(self._tokens[self._best]) * costs.plain_seconds - used_seconds
            self._income = _ASSUMED_SHARE * used_seconds + _GAIN_SHARE * max(gain, 0.0)

    def _learn_time(self, steps: abc.Sequence[StepResult]) -> None:
        """Record the time of a step without continuations, and its gain if it was a probe."""
        largest = steps[0] if len(steps) == 1 else max(steps, key=lambda step: step.query_rows)
        shape, seconds, batch = largest.shape, largest.seconds, len(steps)
        slowness = self._corrections.of(batch).slowness() if self._probes else None
        changed = self._costs.learn(shape, batch, largest.query_rows, seconds)
        self._stale = self._stale or changed
        if not self._probes or all(probed != shape for probed, _ in self._probes):
            return
        while (probe := self._probes.popleft())[0] != shape:
            pass  # continuations replaced the earlier probes
        gained = sum([len(step.path) for step in steps]) / batch
        gained = float(gained - self._tokens[self._best]) / self._pace
        if seconds is not None and slowness is not None:
            gained += max(probe[1] - seconds / slowness, 0.0)
        self._budget.add(gained)

    def _learn_revision(
        self, sequences: abc.Sequence[Sequence], steps: abc.Sequence[StepResult]
    ) -> None:
        """Record the time of a step with continuations, and how far they were accepted."""
        continued = [(o, s) for o, s in zip(sequences, steps, strict=True) if s.from_host]
        revised = self._revisions.popleft()
        while not all(one in revised.found for one, _ in continued):
            revised = self._revisions.popleft()  # all sequences of that revision have ended
        times = self._corrections.of(len(steps))
        changed = times.learn(revised.kind, revised.seconds, steps[0].seconds)
        self._stale = self._stale or changed
        for one, step in continued:
            found = revised.found[one]
            n, right = len(found.tokens), common_prefix(found.tokens, step.tokens)
            trust = self.acceptance.of(biased=one.biased).trust
            trust.learn(found.kind, found.expected / n, right / n)

    def _best_revision(
        self, sequences: abc.Sequence[Sequence], trees: list[Revisable], largest: BeamShape
    ) -> list[RevisedTree] | None:
        """Return the best continuations over trees of at most the largest shape, if any gain."""
        costs, biased = self._costs, all(one.biased for one in sequences)
        trust = self.acceptance.of(biased=biased).trust
        drafted = costs.without_drafting(largest)
        return best_revision(trees, trust, self._pace, drafted, costs.revised, costs.max_nodes)

    def _revisable(
        self, found: Continuation | None, shape: BeamShape, branches: abc.Sequence[float]
    ) -> Revisable:
        """Return a tree, with the number of drafts that its continuation may have."""
        longest = 0 if found is None else len(found.tokens)
        if found is not None and found.limit is not None:
            longest = min(longest, found.limit)
            kind = kind_of(2 * _UNSURE_DRAFTS, waited=True)
            if self._costs.assumed and not self._costs.times.known(kind):
                longest = min(longest, _UNSURE_DRAFTS)
        tokens = float(self._tokens[self._numbers.get(shape, 0)])
        return Revisable(found, longest, shape, branches, tokens)

    def _draft_after(self, revised: abc.Sequence[RevisedTree]) -> bool:
        """Whether to draft for the step after continuations.

        After one that is accepted in full, the match is longer and the next step has another one:
        drafts would be wasted.
        """
        shape, costs = self.shapes[self._best], self._costs
        if shape == PLAIN:
            return True  # nothing is drafted, or it is a probe, which was paid for
        drafting = costs.drafting(shape) * costs.times.correction(shape.nodes)
        extra = float(costs.seconds[self._best]) - costs.plain_seconds - drafting
        gain = float(self._tokens[self._best]) - 1 - self._pace * extra
        holds = sum([tree.holds for tree in revised]) / len(revised)
        return (1 - holds) * gain > self._pace * drafting

    @property
    def _pace(self) -> float:
        """Tokens per second of a sequence in steps of the shape in use."""
        return float(self._tokens[self._best] / self._costs.seconds[self._best])
