"""Step times: by how much steps differ from the cost model's predictions, by query rows.

A profile takes some seconds on a machine that may be busy with other work, and the shape that
looks cheapest among fifty is usually one whose cost was measured too low. So the predicted time of
each row count is corrected by its own steps, compared with plain steps of the same moment: if all
steps become slower, no other shape is chosen.

Only plain steps serve as the measure. If the steps of a row count were compared with each other,
directly or by way of a third, their correction would wander off by chance: each would be taken
relative to the last ones, however far those have come.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_RECENT, _COMPARED = 6, 3
"""Number of steps that are compared with each other, and the minimum number of one kind in them
with whose median a step of another kind is compared. Few: in a minute, a machine may have become
twice as fast."""

_ENOUGH, _MOST = 5, 9
"""Minimum and maximum number of a row count's last comparisons, whose median is its correction."""

_SURPRISE = 1.2
"""Factor by which a plain step differs from the others, corrected, if something has changed."""

_FEW = 2
"""Minimum number of a batch's drafted steps that correct those with other row counts."""

_FORGET_EVERY = 128
"""Number of steps of a batch size after which one comparison of each row count that seemed too
expensive is forgotten, so that it is tried again. Not after each answer: many may be short, or join
one batch."""


def size_class(batch: int) -> int:
    """Return the largest batch size whose steps are compared with those of this one.

    Sizes are taken together up to each power of two: 1, 2, 3 and 4, 5 to 8. What predictions miss
    grows slowly with the size, and where requests come and go, few steps have the same one.
    """
    return 1 << (batch - 1).bit_length()


class SizeTimes:
    """Step times of one class of batch sizes, relative to their predictions.

    size: the largest batch size of the class
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._recent: deque[tuple[int, float]] = deque(maxlen=_RECENT)  # rows, measured / predicted
        self._by_rows: dict[int, deque[float]] = {}  # relative to plain steps
        self._drafted: deque[float] = deque(maxlen=_MOST)  # of a batch, any number of query rows
        self._corrections: dict[int, float] = {}  # of known row counts
        self._steps: Counter[int] = Counter()  # this process's timed ones, by query rows
        self._others = 1.0  # correction of a batch's other row counts
        self._since_plain = 0  # steps
        self._since_forgotten = 0  # timed steps
        self._due = False  # whether a plain step was due, and is unread
        self._untimed = False  # whether the plain step that was due was not timed

    def learn(self, rows: int, predicted: float, seconds: float) -> None:
        """Record a step with `rows` query rows per batch row; NaN seconds are ignored."""
        self._steps[rows] += not math.isnan(seconds)
        if rows == 1 and self._due:
            self._due, self._untimed = False, math.isnan(seconds)
        if math.isnan(seconds):
            return
        ratio = seconds / predicted
        if rows == 1:
            for other in {of for of, _ in self._recent if of > 1}:
                theirs = [each for of, each in self._recent if of == other]
                if len(theirs) >= _COMPARED:
                    self._compare(other, statistics.median(theirs) / ratio)
            slowness = self.slowness()
            self._samples(1).append(1.0 if math.isnan(slowness) else ratio / slowness)
        else:
            # A row count that is not known yet is compared with others: that leads nowhere else.
            known = self.known(rows)
            comparable = [
                each / self.correction(of)
                for of, each in self._recent
                if of == 1 or (of != rows and not known)
            ]
            if len(comparable) >= _COMPARED:
                self._compare(rows, ratio / statistics.median(comparable))
        self._recent.append((rows, ratio))
        self._since_forgotten += 1
        if self._since_forgotten == _FORGET_EVERY:
            self._since_forgotten = 0
            self._forget()

    def slowness(self) -> float:
        """Return the recent ratio of measured to corrected seconds; NaN before the first step."""
        ratios = [ratio / self.correction(rows) for rows, ratio in self._recent]
        return statistics.median(ratios or [math.nan])

    def known(self, rows: int) -> bool:
        """Whether enough steps with `rows` query rows were recorded to correct their cost."""
        return len(self._by_rows.get(rows, ())) >= _ENOUGH

    def used(self, rows: int) -> bool:
        """Whether this process has taken a step with `rows` query rows."""
        return rows in self._steps

    def timed(self, rows: int) -> bool:
        """Whether steps with `rows` query rows have shown what they take, by other costs or these.

        Assumed costs are measured bit by bit, and each time the comparisons with them are lost.
        """
        return self.known(rows) or self._steps[rows] > _ENOUGH

    def correction(self, rows: int) -> float:
        """Return the factor on the predicted seconds of a step with `rows` query rows.

        It is 1 for plain steps. If too few steps had that many rows, it is the mean of the known
        row counts: the profile may be wrong about one row, with which all are compared. The costs
        of batches are less certain, and corrected by any drafted steps until one is known.
        """
        return 1.0 if rows == 1 else self._corrections.get(rows, self._others)

    def plain_is_due(self, every: int) -> bool:
        """Count a step that is about to be chosen; whether it should be plain, as one in `every`.

        One that was not timed, as it compiled its graph, is repeated once.

        Steps with drafts alone cannot tell that drafts became more expensive (on a hot machine, or
        one without mains power) from a machine that became slower for all steps.
        """
        self._since_plain += 1
        if self._untimed:
            self._untimed = False
            return True
        if self._since_plain < every:
            return False
        self._since_plain, self._due = 0, True
        return True

    def surprised(self) -> bool:
        """Whether the last plain step took another time than the steps before it say."""
        last = [*self._by_rows.get(1, ())][-1:]
        return any(not 1 / _SURPRISE < ratio < _SURPRISE for ratio in last)

    def keep(self, unchanged: Callable[[int, int], bool]) -> None:
        """Keep what is known of the (batch, query rows) whose predictions are `unchanged`."""
        kept = {rows: r for rows, r in self._by_rows.items() if unchanged(self.size, rows)}
        if len(kept) < len(self._by_rows):
            self._by_rows = kept
            self._recent.clear()
            self._drafted.clear()
            self._find_corrections()

    def restore(
        self, by_rows: Mapping[int, deque[float]], drafted: deque[float], since: int
    ) -> None:
        """Go on with another process's comparisons, of each row count and of all drafted steps.

        since: number of timed steps since some of them were forgotten
        """
        self._by_rows, self._drafted = {**by_rows}, drafted
        self._since_forgotten = since % _FORGET_EVERY
        self._find_corrections()

    def to_record(self) -> tuple[list[list[object]], list[object]]:
        """Return a record's parts: those of the row counts, and one of the other comparisons."""
        by_rows: list[list[object]] = [
            [self.size, rows, [*ratios]] for rows, ratios in self._by_rows.items() if ratios
        ]
        return by_rows, [self.size, self._since_forgotten, [*self._drafted]]

    def _samples(self, rows: int) -> deque[float]:
        return self._by_rows.setdefault(rows, deque(maxlen=_MOST))

    def _compare(self, rows: int, relative: float) -> None:
        """Record a comparison of steps with drafts and plain ones, relative to the predictions."""
        self._samples(rows).append(relative)
        if self.size > 1:
            self._drafted.append(relative)
        self._find_corrections()

    def _find_corrections(self) -> None:
        """Find the corrections anew, as the comparisons have changed."""
        self._corrections = {
            rows: statistics.median(ratios)
            for rows, ratios in self._by_rows.items()
            if rows > 1 and self.known(rows)
        }
        if self._corrections:
            self._others = statistics.geometric_mean(self._corrections.values())
        else:
            enough = len(self._drafted) >= _FEW
            self._others = statistics.median(self._drafted) if enough else 1.0

    def _forget(self) -> None:
        """Forget one comparison of each row count that seemed too expensive.

        Plain steps are kept: the others are compared with them.
        """
        for rows, ratios in self._by_rows.items():
            if rows > 1 and ratios and statistics.median(ratios) > 1:
                ratios.popleft()
        self._find_corrections()


class StepTimes:
    """Step times of all batch sizes."""

    def __init__(self) -> None:
        self._by_size: dict[int, SizeTimes] = {}

    def of(self, batch: int) -> SizeTimes:
        """Return the step times of the class of a batch size."""
        size = size_class(batch)
        return self._by_size.setdefault(size, SizeTimes(size))

    def keep(self, unchanged: Callable[[int, int], bool]) -> None:
        """Keep what is known of the (batch, query rows) whose predictions are `unchanged`."""
        for times in self._by_size.values():
            times.keep(unchanged)

    def to_record(self) -> dict[str, object]:
        """Return a record of the corrections for a file; `from_record` is the inverse."""
        parts = [times.to_record() for times in self._by_size.values()]
        by_rows = [row for rows, _ in parts for row in rows]
        return {"by_rows": by_rows, "batches": [batch for rows, batch in parts if rows]}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> StepTimes:
        """Read a record; raises ValueError, TypeError or KeyError if it cannot be corrections."""
        times, by_rows = cls(), defaultdict[int, dict[int, deque[float]]](dict)
        for batch, rows, ratios in record["by_rows"]:
            by_rows[size_class(int(batch))][int(rows)] = _measured(ratios)
        drafted = {
            size_class(int(batch)): (_measured(ratios), int(since))
            for batch, since, ratios in record["batches"]
        }
        for size in by_rows.keys() | drafted.keys():
            times.of(size).restore(by_rows[size], *drafted.get(size, (_measured(()), 0)))
        return times


def _measured(ratios: Sequence[float]) -> deque[float]:
    if not all(0 < ratio < math.inf for ratio in ratios):
        raise ValueError(f"{ratios} cannot have been measured")
    return deque(ratios, _MOST)
