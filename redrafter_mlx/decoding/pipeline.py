"""The pipeline of a batch: sequences that share each step, and join or leave between steps.

A step is built, submitted, and its results are read. `Order` says how these three follow one
another from one step to the next; the plain loop, which waits, is the reference of the others.
"""

from __future__ import annotations

from collections import abc
from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx

from redrafter_mlx.config import PLAIN, BeamShape
from redrafter_mlx.decoding.host_drafts import revised
from redrafter_mlx.decoding.order import Order, StepClock
from redrafter_mlx.decoding.proposal import Policy, Proposal
from redrafter_mlx.decoding.report import Report
from redrafter_mlx.decoding.sequence import Sequence, Status
from redrafter_mlx.decoding.sequence_cache import SequenceCache, SequenceSnapshot
from redrafter_mlx.decoding.state import DecodeState, Drafts
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.response import StepResult
from redrafter_mlx.target_model.cache_slots import round_up
from redrafter_mlx.target_model.kv_cache import CAPACITY_STEP, SPARE_STEP, planned_capacity

_CLEAR_EVERY = 256
"""Number of steps after which unused memory is returned to the system, as in mlx-lm's loop."""

Ended = list[tuple[Sequence, SequenceCache]]
"""Sequences that have left the batch, each with its cache, ready to be kept."""


class Advanced(NamedTuple):
    """The outcome of one step of a batch.

    results: each sequence's result of the step; of one that has joined, its prompt's result
    """

    results: dict[Sequence, StepResult]
    ended: Ended


class _Step(NamedTuple):
    """A step of some sequences that is built, and perhaps submitted; its report is unread.

    sequences: by batch row; None where one has left although the step was submitted with it
    state:     after the step
    """

    sequences: list[Sequence | None]
    state: DecodeState
    report: Report

    def running(self) -> list[tuple[int, Sequence]]:
        """Return the batch row of each sequence that goes on."""
        each = enumerate(self.sequences)
        return [(b, s) for b, s in each if s is not None and s.status is not Status.FINISHED]

    @property
    def is_full(self) -> bool:
        """Whether all its sequences go on."""
        return len(self.running()) == len(self.sequences)

    @property
    def capacity(self) -> int:
        """Number of cache slots of each sequence."""
        return self.state.cache.target.capacity

    @property
    def next_capacity(self) -> int:
        """The same once the next trees are verified."""
        nodes = self.state.drafts.tree.tokens.shape[1]
        return max(self.capacity, planned_capacity(self.bound, nodes))

    @property
    def bound(self) -> int:
        """Upper bound of the committed length of its sequences, once its report is read."""
        committed = max(s.committed for s in self.sequences if s is not None)
        return committed + self.report.max_committed


class Pipeline:
    """Sequences that are decoded together, step by step."""

    def __init__(self, decoder: Decoder, policy: Policy) -> None:
        self._decoder, self._policy = decoder, policy
        self._steps: list[_Step] = []  # submitted and unread: one, and those of prompts that join
        self._shape = PLAIN  # the latest choice
        self._awaited = False  # whether the batch is empty, and its first shape is chosen
        self._clock = StepClock()
        self._count = 0

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences in the batch, the newest last."""
        return [each for step in self._steps for each in step.sequences if each is not None]

    @property
    def slots(self) -> int:
        """Number of cache slots that all sequences together hold."""
        return sum(len(step.sequences) * step.capacity for step in self._steps)

    @property
    def growth(self) -> int:
        """Number of cache slots that the next step adds, those of all sequences together."""
        rows = sum(len(step.sequences) for step in self._steps)
        most = max((step.next_capacity for step in self._steps), default=0)
        return rows * most - self.slots

    def first_shape(self, sequence: Sequence, size: int) -> BeamShape:
        """Return the shape of a joining sequence's first drafts.

        An empty batch chooses it once, for `size` sequences like this one, whose prompts are read
        together; otherwise it is the current shape.
        """
        if not (self._steps or self._awaited):
            self._awaited = True
            self._shape = self._policy.propose([sequence] * size).shape
        return self._shape

    def join(self, sequence: Sequence, state: DecodeState, report: Report) -> None:
        """Add a sequence, which takes part from the next step on, with its prompt's results."""
        submit_verification(state, report)
        submit_drafting(state)
        self._awaited = False
        self._steps.append(_Step([sequence], state, report))

    def abandon(self) -> list[Sequence]:
        """Drop all sequences, whose state is lost because `advance` has failed; return them."""
        sequences, self._steps = self.sequences, []
        self._clock.skip()
        return sequences

    def skip_timing(self) -> None:
        """Do not time the current step: it does not have the machine to itself."""
        self._clock.skip()

    def advance(self) -> Advanced:
        """Read what every sequence has emitted, and submit the next step of those that go on."""
        shape = self._shape = self._policy.propose(self.sequences).shape
        order, slow = self._order(), self._decoder.target.slow_calls
        current, running = self._steps, [s for s in self.sequences if s.status is Status.RUNNING]
        if order is Order.SUBMIT_AHEAD:
            self._submit(self._ahead(shape))
            self._skip_slow_calls(slow)  # the host was late to read
            results = self._read(current, order)
            ended = self._remove_ended()
        elif order is Order.BUILD_AHEAD:
            before, ahead = current[0].state.cache.snapshot(), self._ahead(shape)
            self._skip_slow_calls(slow)
            results = self._read(current, order)
            following, ended = self._if_unchanged(ahead, before, shape, results)
            del before, ahead  # MLX would copy buffers that have a second reference
            self._submit_waiting(following, current)
        else:
            results = self._read(current, order)
            following, ended = self._after_reading(shape, results, self._revise())
            self._submit_waiting(following, current)
        self._skip_slow_calls(slow)  # the next step starts late, and a new graph is slow at first
        learned = [sequence for sequence in running if sequence in results]
        self._policy.learn(learned, [results[sequence] for sequence in learned])
        return Advanced(results, ended)

    def _order(self) -> Order:
        """Choose the order of the next step: the host waits as little as the step allows.

        The unread results change the step where sequences join or leave, and where a constraint's
        masks depend on what was accepted. Nor is it built where only continuations from the host
        are verified now: after them the text goes on repeating itself, and the next ones are found
        only in what is read.

        A plain step that no result can change is submitted before they are read, as in mlx-lm's
        loop: no drafter keeps the device busy while the host submits, which on a GPU can take as
        long as a small model's call. If a sequence then ends unexpectedly, its part of the step is
        unused, not wrong.
        """
        if not self._decoder.target.builds_ahead or len(self._steps) != 1:
            return Order.WAIT
        ((sequences, state, report),) = self._steps
        running = [sequence for _, sequence in self._steps[0].running()]
        constrained = any(sequence.constraint is not None for sequence in running)
        if constrained or len(running) < len(sequences):
            return Order.WAIT
        if not state.drafts.are_roots:
            return Order.BUILD_AHEAD
        if all(made.from_host for made in report.drafted):
            return Order.WAIT
        certain = report.max_committed <= 1 and not any(each.ends_next for each in running)
        return Order.SUBMIT_AHEAD if certain and self._stays_plain(running) else Order.BUILD_AHEAD

    def _stays_plain(self, sequences: abc.Sequence[Sequence]) -> bool:
        """Whether a plain tree of these sequences can be submitted before reading.

        Not where the tokens that are still unread may complete an n-gram whose match may pay.
        """
        if not self._decoder.target.submits_ahead or self._decoder.remembers:
            return False
        constrained = any(sequence.constraint is not None for sequence in sequences)
        return not constrained and not self._policy.may_revise(sequences)

    def _ahead(self, shape: BeamShape) -> _Step:
        """Build the next step before the last results are read."""
        (step,) = self._steps
        return _Step(step.sequences, *self._decoder.step(step.state, step.bound, shape))

    def _if_unchanged(
        self,
        ahead: _Step,
        before: SequenceSnapshot,
        shape: BeamShape,
        results: abc.Mapping[Sequence, StepResult],
    ) -> tuple[_Step | None, Ended]:
        """Return the step that was built ahead; another where the results change it.

        That is where a sequence ended or continuations from the host were found. `before` is the
        cache before the step that was built.
        """
        proposals = self._revise()
        if not proposals and ahead.is_full:
            return ahead, []
        self._steps[0].state.cache.restore(before)
        return self._after_reading(shape, results, proposals)

    def _after_reading(
        self,
        shape: BeamShape,
        results: abc.Mapping[Sequence, StepResult],
        proposals: abc.Mapping[Sequence, Proposal],
    ) -> tuple[_Step | None, Ended]:
        """Return the next step, None if no sequence goes on, and those that have ended."""
        ended = self._ended(self._steps)
        sequences: list[Sequence] = []
        states, drafter = [], self._decoder.drafter
        for step in self._steps:
            if not (running := step.running()):
                continue
            rows, mine = zip(*running, strict=True)
            committed = max(sequence.committed for sequence in mine)
            slots = planned_capacity(committed, CAPACITY_STEP)  # a long text may have left
            state = step.state.take(rows, slots, drafter)
            if any(sequence in proposals for sequence in mine):
                roots = [results[sequence].tokens[-1] for sequence in mine]
                chosen = [proposals.get(sequence) for sequence in mine]
                state = replace(state, drafts=revised(state.drafts, chosen, roots))
            sequences += mine
            states.append(state)
        if not states:
            return None, ended
        if len(states) > 1 or not all(step.is_full for step in self._steps):
            self.skip_timing()
        if len(states) > 1 and drafter is not None:
            for state in states:
                state.cache.catch_up(drafter)
        if all(each in proposals and not proposals[each].draft_after for each in sequences):
            shape = PLAIN
        committed = max(sequence.committed for sequence in sequences)
        constraints = [sequence.constraint for sequence in sequences]
        joined = DecodeState.joined(states)
        following = self._decoder.step(joined, committed, shape, constraints)
        return _Step([*sequences], *following), ended

    def _revise(self) -> dict[Sequence, Proposal]:
        """Return what the policy proposes in place of the trees that were drafted."""
        running = [
            (sequence, step.state.drafts.drafted[b])
            for step in self._steps
            for b, sequence in step.running()
        ]
        if not running:
            return {}
        sequences, drafted = zip(*running, strict=True)
        proposals = self._policy.revise(sequences, drafted)
        return {s: p for s, p in zip(sequences, proposals, strict=True) if p is not None}

    def _submit_waiting(self, following: _Step | None, before: abc.Sequence[_Step]) -> None:
        """Submit the next step after reading those `before`, or none.

        A plain step that could have been submitted before is timed from now on, and without the
        drafting after it: in plain decoding there would be none, and the host would work meanwhile.
        """
        self._steps = []
        if following is None:
            return
        sequences = [sequence for _, sequence in following.running()]
        early = following.report.nodes == 1 and self._stays_plain(sequences)
        if early:
            self._clock.restart()
        drafted = [step.state.drafts for step in before]
        self._submit(following, drafted, alone=early and not following.state.drafts.are_roots)

    def _submit(
        self, step: _Step, drafted: abc.Sequence[Drafts] = (), *, alone: bool = False
    ) -> None:
        """Submit the next step of all sequences.

        drafted: the drafts made in the current step
        alone:   time its verification alone
        """
        self._steps = [step]
        submit_verification(step.state, step.report)
        if alone:
            mx.eval(step.report.values)
            self._clock.stop()
        submit_drafting(step.state, drafted if self._decoder.remembers else ())
        self._count += 1
        if self._count % _CLEAR_EVERY == 0:
            mx.clear_cache()

    def _read(self, steps: abc.Sequence[_Step], order: Order) -> dict[Sequence, StepResult]:
        """Read what every sequence has emitted, and add it to those that go on."""
        results, seconds = {}, None
        for step in steps:
            read, running = step.report.read(), step.running()
            if step is steps[0]:  # the sequences of the others have joined
                seconds = self._clock.read(order)
                if len(running) < len(step.sequences):
                    seconds = None  # it would be taken for a step of fewer sequences
            for b, sequence in running:
                timed = seconds if sequence.status is Status.RUNNING else None
                results[sequence] = replace(read[b], seconds=timed)
                sequence.add(results[sequence])
        return results

    def _ended(self, steps: abc.Sequence[_Step]) -> Ended:
        """Return the sequences that have ended, each with a cache for it alone.

        Copies are computed at once: until then they would hold the buffers of the whole batch.
        """
        ended: Ended = []
        for step in steps:
            for b, sequence in enumerate(step.sequences):
                if sequence is None or sequence.status is not Status.FINISHED:
                    continue
                cache = step.state.cache
                if len(step.sequences) > 1:
                    slots = round_up(sequence.committed, SPARE_STEP)
                    cache = cache.take([b], slots, self._decoder.drafter)
                    mx.async_eval(*cache.target.buffers, *cache.of_drafter)
                ended.append((sequence, cache))
        return ended

    def _remove_ended(self) -> Ended:
        """Remove the sequences that have ended, although the step that was submitted holds them."""
        ended = self._ended(self._steps)
        if ended:
            self.skip_timing()  # of a step with a row that is of no use
            gone = {sequence for sequence, _ in ended}
            left = [None if s in gone else s for s in self._steps[0].sequences]
            self._steps = [self._steps[0]._replace(sequences=left)]
        if not self.sequences:
            self._steps = []  # nobody reads the step that was submitted
        return ended

    def _skip_slow_calls(self, before: int) -> None:
        """Do not time the current step if calls were slow: the target counted `before` until it."""
        if self._decoder.target.slow_calls > before:
            self.skip_timing()


def submit_verification(state: DecodeState, report: Report) -> None:
    """Start computing what the host will read."""
    history = [past for past in state.history if past is not None]
    mx.async_eval(report.values, state.length, *history, *state.cache.target.buffers)


def submit_drafting(state: DecodeState, drafted: abc.Sequence[Drafts] = ()) -> None:
    """Start computing the drafts for the next step, after what the host will read.

    `drafted` are the previous step's drafts, from a drafter that remembers. Such a drafter writes
    its buffers in place only if its previous call has ended. The host waits for that while the
    target computes.
    """
    if drafted:
        mx.eval([drafts.tree.tokens for drafts in drafted])
    log_probs = [] if state.drafts.log_probs is None else [state.drafts.log_probs]
    mx.async_eval(*state.drafts.tree.arrays, *log_probs, *state.cache.of_drafter)
