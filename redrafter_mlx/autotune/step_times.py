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
from collections import Counter, deque
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


class StepTimes:
    """Step times relative to their predictions, separately for each class of batch sizes."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[tuple[int, float]]] = {}  # query rows, measured / predicted
        self._by_rows: dict[tuple[int, int], deque[float]] = {}  # relative to plain steps
        self._of_batches: dict[int, deque[float]] = {}  # of steps with drafts, any query rows
        self._corrections: dict[int, dict[int, float]] = {}  # by batch, then by known row count
        self._others: dict[int, float] = {}  # correction of a batch's other row counts
        self._since_plain: Counter[int] = Counter()  # steps by batch
        self._since_forgotten: Counter[int] = Counter()  # timed steps by batch
        self._due: set[int] = set()  # batches whose plain step was due, and is unread
        self._untimed: set[int] = set()  # batches whose plain step was due, and was not timed

    def learn(self, rows: int, predicted: float, seconds: float, batch: int = 1) -> None:
        """Record a step with `rows` query rows per batch row; NaN seconds are ignored."""
        batch = size_class(batch)
        if rows == 1 and batch in self._due:
            self._due.discard(batch)
            if math.isnan(seconds):
                self._untimed.add(batch)
        if math.isnan(seconds):
            return
        recent = self._recent.setdefault(batch, deque(maxlen=_RECENT))
        ratio = seconds / predicted
        if rows == 1:
            for other in {of for of, _ in recent if of > 1}:
                theirs = [each for of, each in recent if of == other]
                if len(theirs) >= _COMPARED:
                    self._compare(other, statistics.median(theirs) / ratio, batch)
            slowness = self.slowness(batch)
            self._samples(1, batch).append(1.0 if math.isnan(slowness) else ratio / slowness)
        else:
            # A row count that is not known yet is compared with others: that leads nowhere else.
            known = self.known(rows, batch)
            comparable = [
                each / self.correction(of, batch)
                for of, each in recent
                if of == 1 or (of != rows and not known)
            ]
            if len(comparable) >= _COMPARED:
                self._compare(rows, ratio / statistics.median(comparable), batch)
        recent.append((rows, ratio))
        self._since_forgotten[batch] += 1
        if self._since_forgotten[batch] == _FORGET_EVERY:
            self._since_forgotten[batch] = 0
            self._forget(batch)

    def slowness(self, batch: int = 1) -> float:
        """Return the recent ratio of measured to corrected seconds; NaN before the first step."""
        batch = size_class(batch)
        recent = self._recent.get(batch, ())
        return statistics.median(
            [ratio / self.correction(rows, batch) for rows, ratio in recent] or [math.nan]
        )

    def known(self, rows: int, batch: int = 1) -> bool:
        """Whether enough steps with `rows` query rows were recorded to correct their cost."""
        return len(self._by_rows.get((size_class(batch), rows), ())) >= _ENOUGH

    def correction(self, rows: int, batch: int = 1) -> float:
        """Return the factor on the predicted seconds of a step with `rows` query rows.

        It is 1 for plain steps. If too few steps had that many rows, it is the mean of the known
        row counts: the profile may be wrong about one row, with which all are compared. The costs
        of batches are less certain, and corrected by any drafted steps until one is known.
        """
        if rows == 1:
            return 1.0
        batch = size_class(batch)
        return self._corrections.get(batch, {}).get(rows, self._others.get(batch, 1.0))

    def _samples(self, rows: int, batch: int) -> deque[float]:
        return self._by_rows.setdefault((batch, rows), deque(maxlen=_MOST))

    def _compare(self, rows: int, relative: float, batch: int) -> None:
        """Record a comparison of steps with drafts and plain ones, relative to the predictions."""
        self._samples(rows, batch).append(relative)
        if batch > 1:
            self._of_batches.setdefault(batch, deque(maxlen=_MOST)).append(relative)
        self._find_corrections(batch)

    def _find_corrections(self, batch: int) -> None:
        """Find the corrections of a batch size anew, as its comparisons have changed."""
        self._corrections[batch] = found = {
            rows: statistics.median(ratios)
            for (of, rows), ratios in self._by_rows.items()
            if of == batch and rows > 1 and self.known(rows, batch)
        }
        drafted = self._of_batches.get(batch, ())
        if found:
            self._others[batch] = statistics.geometric_mean(found.values())
        else:
            self._others[batch] = statistics.median(drafted) if len(drafted) >= _FEW else 1.0

    def _forget(self, batch: int) -> None:
        """Forget one comparison of each row count that seemed too expensive.

        Plain steps are kept: the others are compared with them.
        """
        for (of, rows), ratios in self._by_rows.items():
            if of == batch and rows > 1 and ratios and statistics.median(ratios) > 1:
                ratios.popleft()
        self._find_corrections(batch)

    def plain_is_due(self, every: int, batch: int = 1) -> bool:
        """Count a step that is about to be chosen; whether it should be plain, as one in `every`.

        One that was not timed, as it compiled its graph, is repeated once.

        Steps with drafts alone cannot tell that drafts became more expensive (on a hot machine, or
        one without mains power) from a machine that became slower for all steps.
        """
        batch = size_class(batch)
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
        """Whether the last plain step took another time than the steps before it say."""
        last = [*self._by_rows.get((size_class(batch), 1), ())][-1:]
        return any(not 1 / _SURPRISE < ratio < _SURPRISE for ratio in last)

    def keep(self, unchanged: Callable[[int, int], bool]) -> None:
        """Keep what is known of the (batch, query rows) whose predictions are `unchanged`."""
        changed = {key for key in self._by_rows if not unchanged(*key)}
        self._by_rows = {k: ratios for k, ratios in self._by_rows.items() if k not in changed}
        for batch in {batch for batch, _ in changed}:
            self._recent.pop(batch, None)
            self._of_batches.pop(batch, None)
            self._find_corrections(batch)

    def to_record(self) -> dict[str, object]:
        """Return a record of the corrections for a file; `from_record` is the inverse."""
        by_rows = [[*key, [*ratios]] for key, ratios in self._by_rows.items() if ratios]
        batches = [
            [batch, since, [*self._of_batches.get(batch, ())]]
            for batch, since in self._since_forgotten.items()
        ]
        return {"by_rows": by_rows, "batches": batches}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> StepTimes:
        """Read a record; raises ValueError, TypeError or KeyError if it cannot be corrections."""
        times = cls()
        for batch, rows, ratios in record["by_rows"]:
            times._by_rows[size_class(int(batch)), int(rows)] = _measured(ratios)
        for batch, since, ratios in record["batches"]:
            times._since_forgotten[size_class(int(batch))] = int(since) % _FORGET_EVERY
            times._of_batches[size_class(int(batch))] = _measured(ratios)
        for batch in {of for of, _ in times._by_rows} | {*times._of_batches}:
            times._find_corrections(batch)
        return times


def _measured(ratios: Sequence[float]) -> deque[float]:
    if not all(0 < ratio < math.inf for ratio in ratios):
        raise ValueError(f"{ratios} cannot have been measured")
    return deque(ratios, _MOST)
