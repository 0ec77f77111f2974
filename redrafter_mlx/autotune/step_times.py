"""Step times: by how much steps differ from what the cost model predicts, by query rows.

A profile is some seconds of a machine that may have been busy with other work, and whoever takes
the best of fifty shapes by it takes one whose cost was underestimated. So the cost of each row
count in use is corrected by its own steps, relative to the other steps of the same time: a machine
that has become slower for all of them is no reason to choose otherwise.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

_LATELY = 15
"""Steps whose median tells how slow the machine is now."""

_ENOUGH, _MOST = 5, 9
"""A row count's correction is the median of its last steps, of so many at least and at most."""


class StepTimes:
    """What steps took, as a share of what was predicted."""

    def __init__(self) -> None:
        self._lately: deque[float] = deque(maxlen=_LATELY)
        self._by_rows: dict[tuple[int, int], deque[float]] = {}

    def learn(self, rows: int, predicted: float, seconds: float, batch: int = 1) -> None:
        """Count one step with so many query rows in each batch row; NaN seconds are passed over."""
        if math.isnan(seconds):
            return
        slowness = self.slowness
        self._lately.append(seconds / (predicted * self.correction(rows, batch)))
        if not math.isnan(slowness):
            of_rows = self._by_rows.setdefault((batch, rows), deque(maxlen=_MOST))
            of_rows.append(seconds / (predicted * slowness))

    @property
    def slowness(self) -> float:
        """Of steps lately: measured by predicted and corrected seconds; NaN before the first."""
        return statistics.median(self._lately or [math.nan])

    def known(self, rows: int, batch: int = 1) -> bool:
        """Whether enough steps with so many query rows were counted to correct their cost."""
        return len(self._by_rows.get((batch, rows), ())) >= _ENOUGH

    def correction(self, rows: int, batch: int = 1) -> float:
        """What the predicted seconds of a step with so many query rows are multiplied by."""
        if not self.known(rows, batch):
            return 1.0
        return statistics.median(self._by_rows[batch, rows])

    def begin_answer(self) -> None:
        """Forget a step of each row count: what was too dear once is tried again some day."""
        for ratios in self._by_rows.values():
            if ratios:
                ratios.popleft()
