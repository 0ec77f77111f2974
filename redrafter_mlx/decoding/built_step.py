"""A step that is built: in which order it is submitted and read, and the time that it takes."""

from __future__ import annotations

import time
from collections import abc
from dataclasses import replace
from enum import Enum
from typing import NamedTuple, cast

import mlx.core as mx

from redrafter_mlx.decoding.acceptance import Report
from redrafter_mlx.decoding.cache.sequence_cache import SequenceCache
from redrafter_mlx.decoding.sequence import Policy, Sequence, Status
from redrafter_mlx.decoding.state import DecodeState, Drafts
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.interface import Drafter
from redrafter_mlx.response import StepResult
from redrafter_mlx.target_model.cache.slots import SPARE_STEP, planned_capacity, round_up

Ended = list[tuple[Sequence, SequenceCache]]
"""Sequences that have left a batch, each with its cache, ready to be kept."""


_UNLIMITED = 2**30

_GOING_ON = Status.RUNNING, Status.PREFILL


class BuiltStep(NamedTuple):
    """A step of some sequences that is built, and perhaps submitted.

    sequences: by batch row; None where one has left although the step was submitted with it
    state:     after the step
    report:    what the host has not read yet; None if it has
    """

    sequences: list[Sequence | None]
    state: DecodeState
    report: Report | None

    def with_status(self, *any_of: Status) -> list[tuple[int, Sequence]]:
        """Return the sequences with one of these, each with its batch row."""
        return [(b, s) for b, s in enumerate(self.sequences) if s and s.status in any_of]

    def going_on(self) -> list[tuple[int, Sequence]]:
        """Return the sequences that take the next step, each with its batch row."""
        return [(b, s) for b, s in enumerate(self.sequences) if s and s.status in _GOING_ON]

    @property
    def is_full(self) -> bool:
        """Whether all its sequences go on."""
        return len(self.going_on()) == len(self.sequences)

    @property
    def verifies_roots(self) -> bool:
        """Whether the trees that it verifies hold no drafts."""
        return self.report is not None and self.report.nodes == 1

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
        committed = max([s.committed for s in self.sequences if s is not None])
        return committed + (0 if self.report is None else self.report.max_committed)

    def add(
        self, read: abc.Sequence[StepResult], seconds: float | None
    ) -> dict[Sequence, StepResult]:
        """Add the results by batch row to the sequences that have not ended, and return them.

        No time is a step's with a sequence that has ended: it would be that of fewer sequences.
        """
        unread = self.with_status(Status.RUNNING, Status.PAUSED, Status.PREFILL)
        if len(unread) < len(self.sequences):
            seconds = None
        results = {}
        for b, sequence in unread:
            timed = None if sequence.status is Status.PREFILL else seconds
            results[sequence] = replace(read[b], seconds=timed)
            sequence.add(results[sequence])
        return results

    def alone(self, b: int, drafter: Drafter | None) -> BuiltStep:
        """Return the state of one sequence, a copy of its own; its report has been read."""
        sequence = self.sequences[b]
        assert sequence is not None, "it has left"
        slots = round_up(sequence.committed, SPARE_STEP)
        state = self.state.take([b], slots, drafter)
        if len(self.sequences) > 1:
            _compute_copy(state.cache)
        return BuiltStep([sequence], state, None)

    def ended(self, drafter: Drafter | None) -> Ended:
        """Return the sequences that have ended, each with a cache for it alone."""
        ended: Ended = []
        if finished := self.with_status(Status.FINISHED):
            self._end_at_texts(finished)
        for b, sequence in finished:
            cache = self.state.cache
            if len(self.sequences) > 1:
                cache = cache.take([b], round_up(sequence.committed, SPARE_STEP), drafter)
                _compute_copy(cache)
            ended.append((sequence, cache))
        return ended

    def _end_at_texts(self, finished: abc.Sequence[tuple[int, Sequence]]) -> None:
        """Commit states no further than the texts that have ended, if they can be.

        Their sequences are told how many tokens the states have read.
        """
        target = self.state.cache.target
        if target.forgetful:
            max_lengths = [_UNLIMITED] * len(self.sequences)
            for b, sequence in finished:
                max_lengths[b] = sequence.kept_length
            lengths = cast("list[int]", target.end_at(self.state.length, max_lengths).tolist())
            for b, sequence in finished:
                sequence.committed = lengths[b]


def _compute_copy(cache: SequenceCache) -> None:
    """Start computing a copy: until it is, it holds the buffers of the whole batch."""
    mx.async_eval(*cache.target.buffers, *cache.of_drafter)


def submit_verification(step: BuiltStep) -> None:
    """Start computing what the host will read."""
    state, report = step.state, step.report
    history = [past for past in state.history if past is not None]
    values = [] if report is None else [report.values]
    mx.async_eval(*values, state.length, *history, *state.cache.target.buffers)


def submit_drafting(step: BuiltStep, drafted: abc.Sequence[Drafts] = ()) -> None:
    """Start computing the drafts for the next step, after what the host will read.

    `drafted` are the previous step's drafts, from a drafter that remembers. Such a drafter writes
    its buffers in place only if its previous call has ended. The host waits for that while the
    target computes.
    """
    if drafted:
        mx.eval([drafts.tree.tokens for drafts in drafted])
    drafts, cache = step.state.drafts, step.state.cache
    log_probs = [] if drafts.log_probs is None else [drafts.log_probs]
    mx.async_eval(*drafts.tree.arrays, *log_probs, *cache.of_drafter)


class Order(Enum):
    """How building and submitting a step follow the reading of the results before it.

    WAIT:         read, build, submit: the plain loop, the reference of the others
    BUILD_AHEAD:  build, read, submit: the host builds while the device computes
    SUBMIT_AHEAD: build, submit, read: the device never waits
    """

    WAIT = "wait"
    BUILD_AHEAD = "build ahead"
    SUBMIT_AHEAD = "submit ahead"


def order_of(steps: abc.Sequence[BuiltStep], decoder: Decoder, policy: Policy) -> Order:
    """Choose the order of the step after these: the host waits as little as that step allows.

    The unread results change the step where sequences join or leave, and where a constraint's
    masks depend on what was accepted. Nor is it built where only continuations from the host
    are verified now: after them the text goes on repeating itself, and the next ones are found
    only in what is read.

    A plain step that no result can change is submitted before they are read, as in mlx-lm's
    loop: no drafter keeps the device busy while the host submits, which on a GPU can take as
    long as a small model's call. If a sequence then ends unexpectedly, its part of the step is
    unused, not wrong.
    """
    if not decoder.target.builds_ahead or len(steps) != 1:
        return Order.WAIT
    ((sequences, state, report),) = steps
    running = [sequence for _, sequence in steps[0].going_on()]
    constrained = any(sequence.constraint is not None for sequence in running)
    if constrained or len(running) < len(sequences) or report is None:
        return Order.WAIT
    if not state.drafts.are_roots:
        return Order.BUILD_AHEAD
    if all(made.from_host for made in report.drafted):
        return Order.WAIT
    certain = report.max_committed <= 1 and not any(each.ends_next for each in running)
    if certain and stays_plain(running, decoder, policy):
        return Order.SUBMIT_AHEAD
    return Order.BUILD_AHEAD


def stays_plain(sequences: abc.Sequence[Sequence], decoder: Decoder, policy: Policy) -> bool:
    """Whether a plain tree of these sequences can be submitted before reading.

    Not where the tokens that are still unread may complete an n-gram whose match may pay.
    """
    if not decoder.target.submits_ahead or decoder.remembers:
        return False
    constrained = any(sequence.constraint is not None for sequence in sequences)
    return not constrained and not policy.may_revise(sequences)


class StepClock:
    """Seconds between reads, where they are a step's; None where they are not.

    read_at: when results were last read, by `time.perf_counter`
    """

    def __init__(self) -> None:
        self._began: float | None = None  # when the step before was read, if this one is timed
        self.read_at = 0.0
        self._stopped_at: float | None = None
        self._order = Order.WAIT

    def skip(self) -> None:
        """Do not time the current step."""
        self._began = None

    def restart(self) -> None:
        """Time the current step from now on, if it is timed."""
        if self._began is not None:
            self._began = time.perf_counter()

    def stop(self) -> None:
        """End the current step now, before its results are read."""
        self._stopped_at = time.perf_counter()

    def read(self, order: Order) -> float | None:
        """Return the seconds of the step whose results have just been read, in this order."""
        # MLX may delay the submission of a step until it is nearly computed. So results that are
        # read after the next step was submitted are read late: both must be, or none.
        ahead_before, ahead = self._order is Order.SUBMIT_AHEAD, order is Order.SUBMIT_AHEAD
        if self._stopped_at is None and ahead_before is not ahead:
            self._began = None
        now = time.perf_counter()
        end = now if self._stopped_at is None else self._stopped_at
        seconds = None if self._began is None else end - self._began
        self._began = self.read_at = now
        self._order, self._stopped_at = order, None
        return seconds
