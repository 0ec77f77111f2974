"""Step times: by how much steps differ from the cost model's predictions, by query rows.

A profile takes some seconds on a machine that may be busy with other work, and the shape that
looks cheapest among fifty is usually one whose cost was measured too low. So the predicted time of
each row count is corrected by its own steps, relative to the machine's current speed: if all steps
become slower, no other shape is chosen.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

_RECENT = 6
"""Number of steps whose median is the machine's current slowness. It must follow a change sooner
than a correction does: otherwise a machine that becomes slower for all steps seems slower only for
the row count in use, and others are tried in vain."""

_ENOUGH, _MOST = 5, 9
"""Minimum and maximum number of a row count's last steps, whose median is its correction."""

_SURPRISE = 1.2
"""Factor by which a plain step differs from its correction if something has changed."""

_FEW = 2
"""Minimum number of a batch's drafted steps that correct those with other row counts."""


class StepTimes:
    """Step times relative to their predictions, separately for each number of batch rows."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}
        self._by_rows: dict[tuple[int, int], deque[float]] = {}
        self._drafted: dict[int, deque[float]] = {}  # of steps with drafts, any query rows
        self._since_plain: Counter[int] = Counter()  # steps by batch
        self._due: set[int] = set()  # batches whose plain step was due, and is unread
        self._untimed: set[int] = set()  # batches whose plain step was due, and was not timed

    def learn(self, rows: int, predicted: float, seconds: float, batch: int = 1) -> None:
        """Record a step with `rows` query rows per batch row; NaN seconds are ignored.

        The machine's slowness is taken from steps whose correction is known: others may be dear
        themselves. Before there are any, plain steps tell it, and for one tree all steps, since
        batch costs are less certain than those of one tree.
        """
        if rows == 1 and batch in self._due:
            self._due.discard(batch)
            if math.isnan(seconds):
                self._untimed.add(batch)
        if math.isnan(seconds):
            return
        slowness = self.slowness(batch)
        recent = self._recent.setdefault(batch, deque(maxlen=_RECENT))
        first = len(recent) < _RECENT and (rows == 1 or batch == 1)
        if first or self.known(rows, batch):
            recent.append(seconds / (predicted * self.correction(rows, batch)))
        if not math.isnan(slowness):
            ratio = seconds / (predicted * slowness)
            self._by_rows.setdefault((batch, rows), deque(maxlen=_MOST)).append(ratio)
            if batch > 1 and rows > 1:
                self._drafted.setdefault(batch, deque(maxlen=_MOST)).append(ratio)

    def slowness(self, batch: int = 1) -> float:
        """Return the recent ratio of measured to corrected seconds; NaN before the first step."""
        return statistics.median(self._recent.get(batch) or [math.nan])

    def known(self, rows: int, batch: int = 1) -> bool:
        """Whether enough steps with `rows` query rows were recorded to correct their cost."""
        return len(self._by_rows.get((batch, rows), ())) >= _ENOUGH

    def correction(self, rows: int, batch: int = 1) -> float:
        """Return the factor on the predicted seconds of a step with `rows` query rows.

        If too few of a batch's steps had that many, the factor is that of its other drafted steps.
        """
        if self.known(rows, batch):
            return statistics.median(self._by_rows[batch, rows])
        others = self._drafted.get(batch, ()) if rows > 1 else ()
        return statistics.median(others) if len(others) >= _FEW else 1.0

    def plain_is_due(self, every: int, batch: int = 1) -> bool:
        """Count a step that is about to be chosen; whether it should be plain, as one in `every`.

        One that was not timed, as it compiled its graph, is repeated once.

        Steps with drafts alone cannot tell that drafts became more expensive (on a hot machine, or
        one without mains power) from a machine that became slower for all steps.
        """
        self._since_plain[batch] += 1
        if batch in self._untimed:
            self._untimed.discard(batch)
            return True
        if self._since_plain[batch] < every:
            return False
        self._since_plain[batch] = 0
        self._due.add(batch)
        return True

    def surprised(self, batch: int = 1) -> bool:
        """Whether the last plain step took another time than its correction says."""
        ratios = self._by_rows.get((batch, 1))
        if not ratios:
            return False
        change = ratios[-1] / statistics.median(ratios)
        return not 1 / _SURPRISE < change < _SURPRISE

    def to_record(self) -> dict[str, object]:
        """Return a record of the corrections for a file; `from_record` is the inverse."""
        by_rows = [[*key, [*ratios]] for key, ratios in self._by_rows.items() if ratios]
        return {"by_rows": by_rows, "drafted": [[b, [*r]] for b, r in self._drafted.items()]}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> StepTimes:
        """Read a record; raises ValueError, TypeError or KeyError if it cannot be corrections."""
        times = cls()
        for batch, rows, ratios in record["by_rows"]:
            times._by_rows[int(batch), int(rows)] = _measured(ratios)
        for batch, ratios in record["drafted"]:
            times._drafted[int(batch)] = _measured(ratios)
        return times

    def begin_answer(self) -> None:
        """Forget one step of each row count that seemed too expensive, so that it is tried again.

        Plain steps are kept: the others are compared with them.
        """
        for (_, rows), ratios in self._by_rows.items():
            if rows > 1 and ratios and statistics.median(ratios) > 1:
                ratios.popleft()


def _measured(ratios: Sequence[float]) -> deque[float]:
    if not all(0 < ratio < math.inf for ratio in ratios):
        raise ValueError(f"{ratios} cannot have been measured")
    return deque(ratios, _MOST)
