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
from redrafter_mlx.decoding.acceptance import Report
from redrafter_mlx.decoding.built_step import (
    BuiltStep,
    Ended,
    Order,
    StepClock,
    order_of,
    stays_plain,
    submit_drafting,
    submit_verification,
)
from redrafter_mlx.decoding.cache.sequence_cache import SequenceSnapshot
from redrafter_mlx.decoding.sequence import Policy, Proposal, Sequence, Status
from redrafter_mlx.decoding.state import DecodeState, Drafts, revised
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.response import StepResult
from redrafter_mlx.target_model.cache.slots import CAPACITY_STEP, planned_capacity

_CLEAR_EVERY = 256
"""Number of steps after which unused memory is returned to the system, as in mlx-lm's loop."""


class Advanced(NamedTuple):
    """The outcome of one step of a batch.

    results: each sequence's result of the step; of one that has joined, its prompt's result
    """

    results: dict[Sequence, StepResult]
    ended: Ended


class Pipeline:
    """Sequences that are decoded together, step by step."""

    def __init__(self, decoder: Decoder, policy: Policy) -> None:
        self._decoder, self._policy = decoder, policy
        self._steps: list[BuiltStep] = []  # one, and those of sequences that join
        self._paused: list[BuiltStep] = []
        self._shape = PLAIN  # the latest choice
        self._awaited = False  # whether the batch is empty, and its first shape is chosen
        self._clock = StepClock()
        self._count = 0

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences in the batch, paused ones first and then the newest last."""
        steps = (*self._paused, *self._steps)
        return [each for step in steps for each in step.sequences if each is not None]

    @property
    def read_at(self) -> float:
        """When results were last read, by `time.perf_counter`."""
        return self._clock.read_at

    @property
    def slots(self) -> int:
        """Number of cache slots that all sequences together hold."""
        steps = (*self._paused, *self._steps)
        return sum(len(step.sequences) * step.capacity for step in steps)

    @property
    def growth(self) -> int:
        """Number of cache slots that the next step adds, those of all sequences together."""
        rows = held = capacity = 0
        for step in (*self._steps, *self._coming_back):
            rows += len(step.sequences)
            held += len(step.sequences) * step.capacity
            capacity = max(capacity, step.next_capacity)
        return rows * capacity - held

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
        joined = BuiltStep([sequence], state, report)
        submit_verification(joined)
        submit_drafting(joined)
        self._awaited = False
        self._steps.append(joined)

    def abandon(self) -> None:
        """Drop all sequences, whose state is lost because `advance` has failed."""
        self._steps.clear()
        self._paused.clear()
        self._clock.skip()

    def skip_timing(self) -> None:
        """Do not time the current step: it does not have the machine to itself."""
        self._clock.skip()

    def advance(self) -> Advanced:
        """Read what every sequence has emitted, and submit the next step of those that go on."""
        self._take_back()
        current, sequences = self._steps, [s for step in self._steps for s in step.sequences if s]
        if not sequences:
            return Advanced({}, [])
        shape = self._shape = self._policy.propose(sequences).shape
        order = order_of(current, self._decoder, self._policy)
        slow = self._decoder.target.slow_calls
        running = [s for s in sequences if s.status in (Status.RUNNING, Status.PAUSED)]
        if order is Order.SUBMIT_AHEAD:
            self._submit(self._ahead(shape))
            self._skip_slow_calls(slow)  # the host was late to read
            results = self._read(current, order)
            ended = self._remove_ended()
        elif order is Order.BUILD_AHEAD:
            before, ahead = current[0].state.cache.snapshot(), self._ahead(shape)
            self._skip_slow_calls(slow)
            results = self._read(current, order)
            following, ended = self._if_unchanged(ahead, before, shape)
            del before, ahead  # MLX would copy buffers that have a second reference
            self._submit_waiting(following, current)
        else:
            results = self._read(current, order)
            following, ended = self._after_reading(shape, self._revise())
            self._submit_waiting(following, current)
        self._skip_slow_calls(slow)  # the next step starts late, and a new graph is slow at first
        learned = [sequence for sequence in running if sequence in results]
        self._policy.learn(learned, [results[sequence] for sequence in learned])
        return Advanced(results, ended)

    def _take_back(self) -> None:
        """Let the paused sequences join that are running again, or have ended."""
        if coming_back := self._coming_back:
            self._steps += coming_back
            self._paused = [step for step in self._paused if step not in coming_back]
            self.skip_timing()

    @property
    def _coming_back(self) -> list[BuiltStep]:
        return [step for step in self._paused if not step.with_status(Status.PAUSED)]

    def _ahead(self, shape: BeamShape) -> BuiltStep:
        """Build the next step before the last results are read."""
        (step,) = self._steps
        return BuiltStep(step.sequences, *self._decoder.step(step.state, step.bound, shape))

    def _if_unchanged(
        self, ahead: BuiltStep, before: SequenceSnapshot, shape: BeamShape
    ) -> tuple[BuiltStep | None, Ended]:
        """Return the step that was built ahead; another where the results change it.

        That is where a sequence ended or continuations from the host were found. `before` is the
        cache before the step that was built.
        """
        proposals = self._revise()
        if not proposals and ahead.is_full:
            return ahead, []
        self._steps[0].state.cache.restore(before)
        return self._after_reading(shape, proposals)

    def _after_reading(
        self, shape: BeamShape, proposals: abc.Mapping[Sequence, Proposal]
    ) -> tuple[BuiltStep | None, Ended]:
        """Return the next step, None if no sequence goes on, and those that have ended."""
        drafter = self._decoder.drafter
        ended = [one for step in self._steps for one in step.ended(drafter)]
        sequences: list[Sequence] = []
        states = []
        for step in self._steps:
            self._paused += [step.alone(b, drafter) for b, _ in step.with_status(Status.PAUSED)]
            if not (going_on := step.going_on()):
                continue
            rows, mine = zip(*going_on, strict=True)
            committed = max(sequence.committed for sequence in mine)
            slots = planned_capacity(committed, CAPACITY_STEP)  # a long text may have left
            state = step.state.take(rows, slots, drafter)
            if any(sequence in proposals for sequence in mine):
                roots = [sequence.last_token for sequence in mine]
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
        return BuiltStep([*sequences], *following), ended

    def _revise(self) -> dict[Sequence, Proposal]:
        """Return what the policy proposes in place of the trees that were drafted."""
        running = [
            (sequence, step.state.drafts.drafted[b])
            for step in self._steps
            for b, sequence in step.going_on()
        ]
        if not running:
            return {}
        sequences, drafted = zip(*running, strict=True)
        proposals = self._policy.revise(sequences, drafted)
        return {s: p for s, p in zip(sequences, proposals, strict=True) if p is not None}

    def _submit_waiting(self, following: BuiltStep | None, before: abc.Sequence[BuiltStep]) -> None:
        """Submit the next step after reading those `before`, or none.

        A plain step that could have been submitted before is timed from now on, and without the
        drafting after it: in plain decoding there would be none, and the host would work meanwhile.
        """
        self._steps = []
        if following is None:
            return
        sequences = [sequence for _, sequence in following.going_on()]
        early = following.verifies_roots and stays_plain(sequences, self._decoder, self._policy)
        if early:
            self._clock.restart()
        drafted = [step.state.drafts for step in before]
        self._submit(following, drafted, alone=early and not following.state.drafts.are_roots)

    def _submit(
        self, step: BuiltStep, drafted: abc.Sequence[Drafts] = (), *, alone: bool = False
    ) -> None:
        """Submit the next step of all sequences.

        drafted: the drafts made in the current step
        alone:   time its verification alone
        """
        self._steps = [step]
        submit_verification(step)
        if alone and step.report is not None:
            mx.eval(step.report.values)
            self._clock.stop()
        submit_drafting(step, drafted if self._decoder.remembers else ())
        self._count += 1
        if self._count % _CLEAR_EVERY == 0:
            mx.clear_cache()

    def _read(self, steps: abc.Sequence[BuiltStep], order: Order) -> dict[Sequence, StepResult]:
        """Read what every sequence has emitted, and add it to those that have not ended."""
        results: dict[Sequence, StepResult] = {}
        for step in steps:
            if step.report is not None:
                read = step.report.read()
                # The sequences of the other steps have joined.
                seconds = self._clock.read(order) if step is steps[0] else None
                results |= step.add(read, seconds)
        return results

    def _remove_ended(self) -> Ended:
        """Remove the sequences that have ended, although the step that was submitted holds them."""
        ended = [one for step in self._steps for one in step.ended(self._decoder.drafter)]
        if ended:
            self.skip_timing()  # of a step with a row that is of no use
            gone = {sequence for sequence, _ in ended}
            left = [None if s in gone else s for s in self._steps[0].sequences]
            step = self._steps[0]._replace(sequences=left)
            self._steps = [step] if step.going_on() else []  # or nobody reads it
        return ended

    def _skip_slow_calls(self, before: int) -> None:
        """Do not time the current step if calls were slow: the target counted `before` until it."""
        if self._decoder.target.slow_calls > before:
            self.skip_timing()
