"""Corrections of the cost model: by how much steps differ from its predictions, by query rows.

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
from collections import abc, deque
from collections.abc import Iterable, Mapping
from typing import Any

from redrafter_mlx.config import PLAIN

_COMPARED, _KEPT = 3, 7
"""Minimum number of steps of one kind, among twice as many, with whose median a step is compared,
and maximum number of comparisons, whose median is a correction: a slow step or two correct nothing,
and what changed is noticed (test_step_times, test_a_change_of_what_drafts_cost_is_noticed)."""

_PLAIN_EVERY, _SELDOM = 8, 128
"""One in so many steps is plain until the correction of the shape in use is known, and from then
on. As seldom, one comparison of what seemed too expensive is forgotten
(test_costs_that_are_wrong_at_some_rows_are_found_out_within_forty_steps,
test_what_was_dear_is_tried_again_after_some_hundred_steps)."""

_PLAIN = PLAIN.nodes
"""The kind of plain steps."""


def kind_of(rows: int, *, waited: bool) -> int:
    """Return the kind of a step: steps of one kind are corrected alike.

    It is the number of query rows. Steps that the host built after reading, while the device
    waited, are kinds of their own: minus the row count, rounded up to a power of four, as few have
    the same one.
    """
    bits = (rows - 1).bit_length()
    return -(1 << bits + bits % 2) if waited else rows


class BatchCorrections:
    """Step times of one class of batch sizes, relative to their predictions.

    used:    the kinds of steps that this process has taken
    factors: the factor on the predicted seconds of each known kind, 1 for plain steps
    others:  the factor of drafted kinds that are not known: the profile may be wrong about one row,
             with which all are compared
    """

    def __init__(self) -> None:
        self.used: set[int] = set()
        # Kind, and measured / predicted seconds.
        self._recent: deque[tuple[int, float]] = deque(maxlen=2 * _COMPARED)
        self._ratios: dict[int, deque[float]] = {}  # by kind, relative to plain steps
        self._since_plain = self._since_forgotten = self._untimed = 0  # steps
        self._due = self._repeat = False  # whether a plain step that was due is unread, or untimed
        self.factors, self.others = {_PLAIN: 1.0}, 1.0

    def learn(self, kind: int, predicted: float, seconds: float | None) -> bool:
        """Record a step; return whether that changed a correction. None: it was not timed."""
        self.used.add(kind)
        if kind == _PLAIN and self._due:
            self._due, self._repeat = False, seconds is None
        if seconds is None:
            self._untimed += 1
            return False
        self._untimed, ratio = 0, seconds / predicted
        if kind == _PLAIN:
            drafted = {of for of, _ in self._recent} - {_PLAIN}
            levels = {of: _level([r for k, r in self._recent if k == of]) for of in drafted}
            compared = {of: level / ratio for of, level in levels.items() if level}
        else:
            # A kind that is not known yet is compared with others, too: that leads nowhere else.
            measures = {_PLAIN: 1.0} if kind in self.factors else self.factors
            level = _level([r / measures[of] for of, r in self._recent if of in measures])
            compared = {kind: ratio / level} if level else {}
        self._recent.append((kind, ratio))
        for of, relative in compared.items():
            self._ratios.setdefault(of, deque(maxlen=_KEPT)).append(relative)
        changed = bool(compared)
        self._since_forgotten = (self._since_forgotten + 1) % _SELDOM
        if self._since_forgotten == 0:
            self._forget([of for of in self._ratios if of > 0])
            changed = True
        return self._find_factors() if changed else False

    def slowness(self) -> float | None:
        """Return the recent ratio of measured to corrected seconds; None before the first step."""
        ratios = [ratio / self.correction(kind) for kind, ratio in self._recent]
        return statistics.median(ratios) if ratios else None

    def known(self, kind: int) -> bool:
        """Whether enough steps of this kind were compared with plain ones."""
        return kind in self.factors

    def correction(self, kind: int) -> float:
        """Return the factor on the predicted seconds of a step of this kind."""
        return self.factors.get(kind, self.others if kind > 0 else 1.0)

    def plain_is_due(self, kind: int) -> bool:
        """Count a step that is about to be chosen, of this kind; whether it should be plain.

        One in a few is until the correction of the kind is known, and one in many from then on. One
        that was not timed, as it compiled its graph, is repeated once. None is due where no steps
        are timed.

        Steps with drafts alone cannot tell that drafts became more expensive (on a hot machine, or
        one without mains power) from a machine that became slower for all steps.
        """
        self._since_plain += 1
        if self._repeat:
            self._repeat = False
            return True
        known = kind in self.factors and (kind != _PLAIN or len(self.factors) > 1)
        if self._since_plain < (_SELDOM if known else _PLAIN_EVERY) or self._untimed > _COMPARED:
            return False
        self._since_plain, self._due = 0, True
        return True

    def to_record(self) -> list[object]:
        """Return a record for a file; `restore` is the inverse."""
        ratios = [[kind, [*ratios]] for kind, ratios in self._ratios.items() if ratios]
        return [self._since_forgotten, ratios]

    def restore(self, since: int, by_kind: abc.Sequence[tuple[int, abc.Sequence[float]]]) -> None:
        """Go on with another process's comparisons; raises ValueError for what cannot be any."""
        for kind, ratios in by_kind:
            if not ratios or not all(0 < ratio < math.inf for ratio in ratios):
                raise ValueError(f"{ratios} cannot have been measured")
            self._ratios[int(kind)] = deque(ratios, _KEPT)
        self._since_forgotten = int(since) % _SELDOM
        self._find_factors()

    def begin_answer(self) -> None:
        """Let another text try again the steps built after reading that seemed too expensive."""
        self._forget([kind for kind in self._ratios if kind < 0])
        self._find_factors()

    def _forget(self, kinds: Iterable[int]) -> None:
        """Forget one comparison of each of these kinds that seemed too expensive."""
        for kind in kinds:
            if statistics.median(self._ratios[kind] or [1.0]) > 1:
                self._ratios[kind].popleft()

    def _find_factors(self) -> bool:
        """Find the corrections anew; return whether any changed."""
        before = self.factors
        known = {kind: r for kind, r in self._ratios.items() if len(r) > 1}
        drafted = {kind: statistics.median([1.0, *r]) for kind, r in known.items()}
        sizes: dict[int, list[float]] = {}
        for kind, factor in drafted.items():
            if kind > 0:
                sizes.setdefault((kind - 1).bit_length(), []).append(factor)
        # Row counts of about one size may be wrong alone; if all sizes are, it is the plain step.
        self.others = statistics.median([1.0, *map(statistics.median, sizes.values())])
        self.factors = {_PLAIN: 1.0, **drafted}
        return before != self.factors


class Corrections:
    """Corrections for all batch sizes.

    Sizes are taken together up to each power of two: 1, 2, 3 and 4, 5 to 8. What predictions miss
    grows slowly with the size, and where requests come and go, few steps have the same one.

    saved: seconds that probes may cost; infinite until the first is paid
    """

    def __init__(self) -> None:
        self.saved = math.inf
        self._by_class: dict[int, BatchCorrections] = {}

    def of(self, batch: int) -> BatchCorrections:
        """Return the corrections of the class of a batch size."""
        number = (batch - 1).bit_length()
        if number not in self._by_class:
            self._by_class[number] = BatchCorrections()
        return self._by_class[number]

    def begin_answer(self) -> None:
        """Let the text of a new answer try again what was too expensive for others."""
        for times in self._by_class.values():
            times.begin_answer()

    def to_record(self) -> dict[str, object]:
        """Return a record for a file; `from_record` is the inverse."""
        return {str(number): times.to_record() for number, times in self._by_class.items()}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Corrections:
        """Read a record; raises ValueError, TypeError or KeyError if it cannot be corrections."""
        found = cls()
        for number, (since, ratios) in record.items():
            found._by_class[int(number)] = times = BatchCorrections()
            times.restore(since, ratios)
        return found


def _level(ratios: abc.Sequence[float]) -> float | None:
    """Return the median of recent steps; None if there are too few."""
    return statistics.median(ratios) if len(ratios) >= _COMPARED else None
