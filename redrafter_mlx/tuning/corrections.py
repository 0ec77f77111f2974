"""Corrections of the cost model: by how much steps differ from its predictions, by query rows.

A profile takes some seconds on a machine that may be busy with other work, and the shape that
looks cheapest among fifty is usually one whose cost was measured too low. So the predicted time of
each row count is corrected by its own steps, compared with plain steps of the same moment: if all
steps become slower, no other shape is chosen. Steps with drafts alone cannot tell drafts that
became more expensive from a machine that became slower, so a plain step is due now and then.

Only plain steps serve as the measure. If the steps of a row count were compared with each other,
directly or by way of a third, their correction would wander off by chance: each would be taken
relative to the last ones, however far those have come.
"""

from __future__ import annotations

import math
from collections import abc, defaultdict, deque
from collections.abc import Mapping
from statistics import median
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
"""The kind of plain steps: steps of one kind are corrected alike. It is their query rows."""


def waited(rows: int) -> int:
    """Return the kind of a step that the host built after reading, while the device waited.

    It is minus the row count, rounded up to a power of four, as few have the same one.
    """
    bits = (rows - 1).bit_length()
    return -(1 << bits + bits % 2)


class BatchCorrections:
    """Step times of one class of batch sizes, relative to their predictions.

    used:    the kinds of steps that this process has taken
    factors: the factor on the predicted seconds of each known kind, 1 for plain steps
    others:  the factor of drafted kinds that are not known: the profile may be wrong about one row,
             with which all are compared
    """

    def __init__(self) -> None:
        self.used: set[int] = set()
        self.factors, self.others = {_PLAIN: 1.0}, 1.0
        # Kind, and measured / predicted seconds.
        self._recent: deque[tuple[int, float]] = deque(maxlen=2 * _COMPARED)
        self._ratios: dict[int, deque[float]] = {}  # by kind, relative to plain steps
        self._timed = self._untimed = self._since_plain = 0  # steps
        self._due = self._repeat = False  # whether a plain step that was due is unread, or untimed

    def learn(self, kind: int, predicted: float, seconds: float | None) -> bool:
        """Record a step; return whether that changed a correction. None: it was not timed."""
        self.used.add(kind)
        if kind == _PLAIN and self._due:
            self._due, self._repeat = False, seconds is None
        if seconds is None:
            self._untimed += 1
            return False
        ratio, recent = seconds / predicted, self._recent
        levels: dict[int, list[float]] = {}
        if kind == _PLAIN:
            for of, r in recent:
                if of != _PLAIN:
                    levels.setdefault(of, []).append(r / ratio)
        else:
            # A kind that is not known yet is compared with others, too: that leads nowhere else.
            measures = {_PLAIN: 1.0} if kind in self.factors else self.factors
            levels[kind] = [ratio / r * measures[of] for of, r in recent if of in measures]
        recent.append((kind, ratio))
        self._untimed, self._timed = 0, self._timed + 1
        changed = self._timed % _SELDOM == 0
        if changed:
            self._forget(drafted=True)
        for of, relative in levels.items():
            if len(relative) >= _COMPARED:
                self._ratios.setdefault(of, deque(maxlen=_KEPT)).append(median(relative))
                changed = True
        if changed:
            self._find_factors()
        return changed

    def slowness(self) -> float | None:
        """Return the recent ratio of measured to corrected seconds; None before the first step."""
        return median([r / self.correction(of) for of, r in self._recent]) if self._recent else None

    def correction(self, kind: int) -> float:
        """Return the factor on the predicted seconds of a step of this kind."""
        return self.factors.get(kind, self.others if kind > 0 else 1.0)

    def plain_is_due(self, kind: int) -> bool:
        """Count a step that is about to be chosen, of this kind; whether it should be plain.

        One in a few is until the correction of the kind is known, and one in many from then on. One
        that was not timed, as it compiled its graph, is repeated once. None is due where no steps
        are timed.
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

    def begin_answer(self) -> None:
        """Let another text try again the steps built after reading that seemed too expensive."""
        self._forget(drafted=False)
        self._find_factors()

    def to_record(self) -> list[object]:
        """Return a record for a file; `restore` is the inverse."""
        return [self._timed % _SELDOM, [[kind, [*r]] for kind, r in self._ratios.items() if r]]

    def restore(self, timed: int, by_kind: abc.Sequence[tuple[int, abc.Sequence[float]]]) -> None:
        """Go on with another process's comparisons; raises ValueError for what cannot be any."""
        for kind, ratios in by_kind:
            if not ratios or not all(0 < ratio < math.inf for ratio in ratios):
                raise ValueError(f"{ratios} cannot have been measured")
            self._ratios[int(kind)] = deque(ratios, _KEPT)
        self._timed = int(timed)
        self._find_factors()

    def _forget(self, *, drafted: bool) -> None:
        """Forget one comparison of each kind, drafted or waited, that seemed too expensive."""
        for kind, ratios in self._ratios.items():
            if (kind > 0) == drafted and ratios and median(ratios) > 1:
                ratios.popleft()

    def _find_factors(self) -> None:
        """Find the corrections anew."""
        known = {kind: median([1.0, *r]) for kind, r in self._ratios.items() if len(r) > 1}
        sizes: dict[int, list[float]] = {}
        for kind, factor in known.items():
            if kind > 0:
                sizes.setdefault((kind - 1).bit_length(), []).append(factor)
        # Row counts of about one size may be wrong alone; if all sizes are, it is the plain step.
        self.others = median([1.0, *map(median, sizes.values())])
        self.factors = {_PLAIN: 1.0, **known}


class Corrections:
    """Corrections for all batch sizes.

    Sizes are taken together up to each power of two: 1, 2, 3 and 4, 5 to 8. What predictions miss
    grows slowly with the size, and where requests come and go, few steps have the same one.

    saved: seconds that probes may cost; infinite until the first is paid
    """

    def __init__(self) -> None:
        self.saved = math.inf
        self._by_class: defaultdict[int, BatchCorrections] = defaultdict(BatchCorrections)

    def of(self, batch: int) -> BatchCorrections:
        """Return the corrections of the class of a batch size."""
        return self._by_class[(batch - 1).bit_length()]

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
        for number, (timed, ratios) in record.items():
            found._by_class[int(number)].restore(timed, ratios)
        return found
