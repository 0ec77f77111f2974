"""The order of a step's parts, and the time that steps take."""

from __future__ import annotations

import time
from enum import Enum


class Order(Enum):
    """How building and submitting a step follow the reading of the results before it.

    WAIT:         read, build, submit: the plain loop, the reference of the others
    BUILD_AHEAD:  build, read, submit: the host builds while the device computes
    SUBMIT_AHEAD: build, submit, read: the device never waits
    """

    WAIT = "wait"
    BUILD_AHEAD = "build ahead"
    SUBMIT_AHEAD = "submit ahead"


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
