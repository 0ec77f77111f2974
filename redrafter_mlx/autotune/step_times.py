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
from collections.abc import Mapping, Sequence

_LATELY = 15
"""Steps whose median tells how slow the machine is now."""

_ENOUGH, _MOST = 5, 9
"""A row count's correction is the median of its last steps, of so many at least and at most."""

_FEW = 2
"""So many drafted steps of a batch tell of those with other row counts."""


class StepTimes:
    """What steps took, as a share of what was predicted, apart for each number of batch rows."""

    def __init__(self) -> None:
        self._lately: dict[int, deque[float]] = {}
        self._by_rows: dict[tuple[int, int], deque[float]] = {}
        self._drafted: dict[int, deque[float]] = {}  # of steps with drafts, whatever their rows

    def learn(self, rows: int, predicted: float, seconds: float, batch: int = 1) -> None:
        """Count one step with so many query rows in each batch row; NaN seconds are passed over.

        What batches cost is less sure than what one tree does. So it is plain steps that tell how
        slow the machine is for a batch, and others once they are known.
        """
        if math.isnan(seconds):
            return
        slowness = self.slowness(batch)
        if batch == 1 or rows == 1 or self.known(rows, batch):
            lately = self._lately.setdefault(batch, deque(maxlen=_LATELY))
            lately.append(seconds / (predicted * self.correction(rows, batch)))
        if not math.isnan(slowness):
            ratio = seconds / (predicted * slowness)
            self._by_rows.setdefault((batch, rows), deque(maxlen=_MOST)).append(ratio)
            if batch > 1 and rows > 1:
                self._drafted.setdefault(batch, deque(maxlen=_MOST)).append(ratio)

    def slowness(self, batch: int = 1) -> float:
        """Of steps lately: measured by predicted and corrected seconds; NaN before the first."""
        return statistics.median(self._lately.get(batch) or [math.nan])

    def known(self, rows: int, batch: int = 1) -> bool:
        """Whether enough steps with so many query rows were counted to correct their cost."""
        return len(self._by_rows.get((batch, rows), ())) >= _ENOUGH

    def correction(self, rows: int, batch: int = 1) -> float:
        """What the predicted seconds of a step with so many query rows are multiplied by.

        Where too few steps of a batch had so many, those with other drafts tell.
        """
        if self.known(rows, batch):
            return statistics.median(self._by_rows[batch, rows])
        others = self._drafted.get(batch, ()) if rows > 1 else ()
        return statistics.median(others) if len(others) >= _FEW else 1.0

    def to_record(self) -> dict[str, list[list[float]]]:
        """For a file: `from_record` makes the same of it, but for how slow the machine is now."""
        by_rows = [[batch, rows, *ratios] for (batch, rows), ratios in self._by_rows.items()]
        return {
            "by_rows": by_rows,
            "drafted": [[batch, *ratios] for batch, ratios in self._drafted.items()],
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Sequence[Sequence[float]]]) -> StepTimes:
        """Raises ValueError, TypeError or KeyError for what no times can be."""
        known = cls()
        for batch, rows, *ratios in record["by_rows"]:
            known._by_rows[int(batch), int(rows)] = deque(map(measured, ratios), maxlen=_MOST)
        for batch, *ratios in record["drafted"]:
            known._drafted[int(batch)] = deque(map(measured, ratios), maxlen=_MOST)
        return known

    def begin_answer(self) -> None:
        """Doubt a little what was too dear once, so that it is tried again some day."""
        for ratios in self._by_rows.values():
            if statistics.median(ratios) > 1:
                ratios.append(1.0)


def measured(number: float) -> float:
    """Raises ValueError for a number that is not positive and finite."""
    if not 0 < number < math.inf:
        raise ValueError(f"{number} cannot have been measured")
    return number
