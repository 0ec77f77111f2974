"""Policy: the proposal with the most expected tokens per second, step by step.

Expected tokens come from the acceptance statistics, seconds from the cost model, corrected by what
steps take. A shape, or plain decoding, is chosen after a step that shows what it is worth. Others
that seem to promise more are probed, as far as the time saved for that goes. Continuations that
the host finds after reading replace the drafts, or join them.

The sequences of a batch share one shape, chosen by the cost of all of them together and the mean
number of tokens of each: drafting stops where a batch fills the device by itself.
"""

from __future__ import annotations

import math
from collections import abc, deque
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from redrafter_mlx.config import MAX_BEAM_LENGTH, PLAIN, BeamShape
from redrafter_mlx.decoding.cache.prefix_cache import common_prefix
from redrafter_mlx.decoding.sequence import Drafted, Proposal, Sequence
from redrafter_mlx.drafting.untrained.continuation import Continuation
from redrafter_mlx.response import StepResult
from redrafter_mlx.tuning.acceptance import AcceptanceStatistics
from redrafter_mlx.tuning.corrections import COMPARED, Corrections, StepCosts, waited
from redrafter_mlx.tuning.cost import CostModel, candidates
from redrafter_mlx.tuning.revision import Tree, best_revision

_MARGIN = 0.01
"""Minimum relative gain for which another shape replaces the current one: less is noise
(test_a_small_gain_is_not_worth_a_change)."""

_SHARE, _MAX_LOSS = 0.016, 0.03
"""Shares of the time that probes may cost: of all answers together, so that all costs of a useless
drafter are 2% (test_a_useless_drafter_costs_at_most_two_percent_wherever_it_was_useful_before), and
of any one while costs are assumed
(test_no_answer_with_a_fresh_cache_is_slower_than_plain_decoding_by_over_three_percent)."""


class _Verified(NamedTuple):
    """A step with continuations: those by sequence, and what is predicted of it."""

    found: dict[Sequence, Continuation]
    nodes: int
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
        trial: abc.Iterable[BeamShape] = (),
    ) -> None:
        """`trial`: shapes of the first steps, which teach what the drafter costs and gains."""
        self.acceptance = acceptance or AcceptanceStatistics(candidates(costs))
        self.shapes = (PLAIN, *self.acceptance.shapes)
        self._proposals = [Proposal(shape) for shape in self.shapes]
        self._trial, self._trying = deque(trial), False
        self._corrections = corrections or Corrections()
        self._costs = StepCosts(self.shapes, costs, self._corrections)
        self._longest = min(MAX_BEAM_LENGTH, costs.max_nodes) - 1  # continuation
        self._biased = False  # whether most sequences are
        self._chosen_for = 0, 0  # sequences, and bits of the longest one's length; 0 if outdated
        self._tokens = np.ones(len(self.shapes))  # of a sequence
        self._best = self._probed = 0  # indices of shapes
        self._pace = 1.0  # tokens per second of a sequence in steps of the best shape
        self._allowed = 0.0 if costs.assumed else math.inf  # seconds that probes may cost here
        self._price = self._max_seconds = 0.0  # of a probe
        # Unread ones, and the most seconds that they may take.
        self._probes: deque[tuple[BeamShape, float]] = deque(maxlen=COMPARED)
        # Of the step that is read, and of the next: sequences may end before theirs is verified.
        self._verified: deque[_Verified] = deque(maxlen=2)

    def begin_answer(self) -> None:
        """Give continuations that were given up another chance, for the text of a new answer."""
        self._corrections.begin_answer()
        self.acceptance.begin_answer()

    def propose(self, sequences: abc.Sequence[Sequence]) -> Proposal:
        """Return what to draft, the same for all sequences."""
        length, batch = max([one.committed for one in sequences]), len(sequences)
        if self._chosen_for != (batch, length.bit_length()):
            self._choose(length, batch)
        self._trying = bool(self._trial)
        if self._trying:
            return Proposal(self._trial.popleft())
        number = self._best
        if self._costs.times.plain_is_due(self._costs.rows[number]):
            number = 0
        elif self._probed != number and self._pays_probe():
            number = self._probed
        return self._proposals[number]

    def revise(
        self, sequences: abc.Sequence[Sequence], drafted: abc.Sequence[Drafted]
    ) -> list[Proposal | None]:
        """Return the continuations that gain most time over the trees as they were drafted."""
        found = [one.continuations(1, self._longest) for one in sequences]
        if self._trying or not any(found):
            return [None] * len(sequences)
        trees = [
            self._tree(one, best[0] if best else None, made.shape, joinable=made.joinable)
            for one, best, made in zip(sequences, found, drafted, strict=True)
        ]
        largest = max([made.shape for made in drafted], key=lambda shape: shape.nodes)
        chosen = best_revision(trees, self._pace, self._costs, largest)
        if chosen is None:
            return [None] * len(sequences)
        count, join, nodes = chosen
        proposals = [tree.proposal(count, join=join) for tree in trees]
        seconds = self._costs.after_reading(nodes) + self._costs.drafting(largest)
        continued = {o: p.continuations[0] for o, p in zip(sequences, proposals, strict=True) if p}
        self._verified.append(_Verified(continued, nodes, seconds))
        # After one that is accepted in full, the match is longer and the next step has another one.
        after = 2 * sum([(tree.holds[:count] or [0.0])[-1] for tree in trees]) < len(trees)
        return [one and replace(one, draft_after=one.join or after) for one in proposals]

    def may_revise(self, sequences: abc.Sequence[Sequence]) -> bool:
        """Whether the longest matches that the next tokens can complete would be verified.

        Otherwise plain steps need not wait for those tokens. A shorter match is less often right.
        """
        found = [one.next_continuation(self._longest) for one in sequences]
        if self._trying or not any(found):
            return False
        trees = [self._tree(o, best, PLAIN) for o, best in zip(sequences, found, strict=True)]
        return best_revision(trees, self._pace, self._costs, PLAIN) is not None

    def learn(self, sequences: abc.Sequence[Sequence], steps: abc.Sequence[StepResult]) -> None:
        """Record the results of a step, which may come some steps late."""
        if not sequences:
            return
        drafts: dict[bool, list[StepResult]] = {}  # by whether the sequence is biased
        biased, from_host = 0, False
        for one, step in zip(sequences, steps, strict=True):
            biased, from_host = biased + one.biased, from_host or step.from_host
            if step.shape.length > 1 and not step.from_host:
                drafts.setdefault(one.biased, []).append(step)
        majority = 2 * biased > len(sequences)
        changed, self._biased = majority != self._biased, majority
        learn = self._learn_continuations if from_host else self._learn_drafts
        changed |= learn(sequences, steps) or bool(drafts)
        for of, drafted in drafts.items():
            self.acceptance.of(biased=of).learn(*drafted)
        if changed:
            self._chosen_for = 0, 0

    def expected_rates(self, length: int) -> dict[BeamShape, tuple[float, float]]:
        """Return each shape's expected tokens per step and per second, after `length` tokens."""
        self._choose(length, 1)
        pairs = zip(self._tokens.tolist(), self._costs.seconds.tolist(), strict=True)
        return {s: (n, n / seconds) for s, (n, seconds) in zip(self.shapes, pairs, strict=True)}

    def _choose(self, length: int, batch: int) -> None:
        """Choose the best shape among those with evidence, and the shape to probe."""
        self._chosen_for, costs = (batch, length.bit_length()), self._costs
        costs.look_up(length, batch)
        known = self.acceptance.of(biased=self._biased)
        self._tokens[1:] = known.tokens()
        paces = self._tokens / costs.seconds
        trusted = paces / costs.doubts
        trusted[1:][known.steps() < 1] = 0.0
        used = self._best if trusted[self._best] else 0
        trusted[used] = paces[used]
        best, promising = int(trusted.argmax()), int(paces.argmax())
        self._best = best if trusted[best] > paces[used] * (1 + _MARGIN) else used
        self._pace = float(paces[self._best])
        gains = paces[promising] > self._pace * (1 + _MARGIN)
        self._probed = promising if gains else self._best
        # Drafting may pay by now; what costs least is tried first where nothing is known.
        if len(paces) > 1 and self._best == 0 and (not gains or costs.nothing_is_known):
            self._probed = 1 + int(costs.seconds[1:].argmin())
            if not gains and self._corrections.saved == math.inf:
                self._corrections.saved = 0.0  # a probe hardly pays
        self._max_seconds = costs.max_seconds(self._probed)
        longer = max(self._max_seconds - float(costs.seconds[self._best]), 0.0)
        # A draft among plain steps costs two turns.
        self._price = max(longer, costs.late if self._best == 0 else 0.0)

    def _pays_probe(self) -> bool:
        """Pay for a probe of the promising shape, if enough time is saved for it."""
        used, corrections = float(self._tokens[self._best]) / self._pace, self._corrections
        corrections.saved = min(corrections.saved + _SHARE * used, COMPARED * self._price)
        self._allowed += _MAX_LOSS * used
        if min(corrections.saved, self._allowed) < self._price:
            return False
        self._pay(self._price)
        self._probes.append((self.shapes[self._probed], self._max_seconds))
        return True

    def _pay(self, seconds: float) -> None:
        self._corrections.saved -= seconds
        self._allowed -= seconds

    def _learn_drafts(
        self, sequences: abc.Sequence[Sequence], steps: abc.Sequence[StepResult]
    ) -> bool:
        """Record the time of a step without continuations, and its gain if it was a probe.

        Returns whether that changed a correction. The gain is saved for the next probe, so that a
        successful one is followed by another at once.
        """
        batch, largest = len(sequences), steps[0]
        if batch > 1:
            largest = max(steps, key=lambda step: step.query_rows)
        for probe in self._probes:
            if probe[0] == largest.shape:
                self._probes.remove(probe)
                tokens = sum([len(step.path) for step in steps]) / batch
                self._pay((float(self._tokens[self._best]) - tokens) / self._pace)
                slowness = self._corrections.of(batch).slowness()
                if largest.seconds is not None and slowness is not None:
                    self._pay(min(largest.seconds / slowness - probe[1], 0.0))
                break
        return self._costs.learn(largest, batch)

    def _learn_continuations(
        self, sequences: abc.Sequence[Sequence], steps: abc.Sequence[StepResult]
    ) -> bool:
        """Do the same for a step with continuations, and record how far they were accepted."""
        continued = [(o, s) for o, s in zip(sequences, steps, strict=True) if s.from_host]
        while self._verified:
            found, nodes, seconds = self._verified.popleft()
            if all(one in found for one, _ in continued):
                break
        else:
            return False  # all sequences of that step had ended
        for one, step in continued:
            drafts = found[one]
            n, right = len(drafts.tokens), common_prefix(drafts.tokens, step.tokens)
            trust = self.acceptance.of(biased=one.biased).trust
            trust.learn(drafts.kind, drafts.expected / n, right / n)
        times = self._corrections.of(len(steps))
        return times.learn(waited(nodes), seconds, steps[0].seconds)

    def _tree(
        self,
        sequence: Sequence,
        found: Continuation | None,
        shape: BeamShape,
        *,
        joinable: bool = False,
    ) -> Tree:
        """Return a tree as it was drafted, with the drafts that its continuation may have.

        If it has a limit, a quarter of that until it is known what such steps take: a wrong one
        can cost several plain steps. Few numbers are possible: each needs its own compiled graph.
        """
        tokens = float(self._tokens[self._costs.numbers.get(shape, 0)])
        if found is None:
            return Tree(shape, tokens)
        longest = len(found.tokens)
        if found.limit is not None:
            sure = self._costs.is_sure_of(found.limit // 4 + 1)
            longest = min(longest, found.limit if sure else found.limit // 4)
        longest = (1 << (longest + 1).bit_length() - 1) - 1
        known = self.acceptance.of(biased=sequence.biased)
        trusted = known.trust.of(found.kind)
        holds = [trusted * math.exp(p) for p in found.log_probs[:longest]]
        return Tree(shape, tokens, found, holds, known.accepted_by_depth(shape) if joinable else ())
