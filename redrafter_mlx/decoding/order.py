"""The order of a step's parts, and the time that steps take."""

from __future__ import annotations

import time
from collections import abc
from enum import Enum

from redrafter_mlx.decoding.built_step import BuiltStep
from redrafter_mlx.decoding.proposal import Policy
from redrafter_mlx.decoding.sequence import Sequence
from redrafter_mlx.decoding.step import Decoder


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


def times_a_step(before: Order, order: Order) -> bool:
    """Whether the time from one read to the next is that of a step.

    MLX may delay the submission of a step until it is nearly computed. So results that are read
    after the next step was submitted are read late: both must be, or none.
    """
    return (before is Order.SUBMIT_AHEAD) == (order is Order.SUBMIT_AHEAD)


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
        if self._stopped_at is None and not times_a_step(self._order, order):
            self.skip()
        now = time.perf_counter()
        end = now if self._stopped_at is None else self._stopped_at
        seconds = None if self._began is None else end - self._began
        self._began = self.read_at = now
        self._order, self._stopped_at = order, None
        return seconds
