"""Times the steps of a batch, from one read of results to the next."""

from __future__ import annotations

import math
import time


class StepClock:
    """Seconds between reads, where they are a step's; NaN where they are not.

    MLX may delay the submission of a step until it is nearly computed. So results that are read
    after the next step was submitted are read late. The time from one read to the next is a step's
    only if both were late, or none.
    """

    def __init__(self) -> None:
        self._read_at, self._late = math.nan, False
        self._stopped_at: float | None = None

    def skip(self) -> None:
        """Do not time the current step."""
        self._read_at = math.nan

    def restart(self) -> None:
        """Time the current step from now on, if it is timed."""
        if not math.isnan(self._read_at):
            self._read_at = time.perf_counter()

    def stop(self) -> None:
        """End the current step now, before its results are read."""
        self._stopped_at = time.perf_counter()

    def read(self, *, late: bool) -> float:
        """Return the seconds of the step whose results have just been read.

        late: whether the next step was submitted before
        """
        if late != self._late and self._stopped_at is None:
            self.skip()
        now = time.perf_counter()
        seconds = (now if self._stopped_at is None else self._stopped_at) - self._read_at
        self._read_at, self._late, self._stopped_at = now, late, None
        return seconds
