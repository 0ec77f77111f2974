"""Corrections of the cost model: by how much steps differ from its predictions, by query rows.

A profile takes some seconds on a machine that may be busy, and the shape that looks cheapest among
fifty is usually one whose cost was measured too low. So each row count is corrected by its own
steps, compared with plain steps of the same moment: if all steps become slower, no other shape is
chosen. Plain steps alone are the measure: row counts that were compared with each other would
wander off by chance. So a plain step is due now and then.
"""

from __future__ import annotations

import math
from collections import abc, defaultdict, deque
from collections.abc import Mapping
from statistics import median
from typing import Any

import numpy as np

from redrafter_mlx.config import PLAIN, BeamShape
from redrafter_mlx.response import StepResult
from redrafter_mlx.tuning.cost import Array, CostModel

COMPARED = 3
"""Minimum number of steps of one kind, among twice as many, with whose median a step is compared: a
slow step or two correct nothing (test_step_times). As many probes can be paid at once: one that
failed does not end a series (test_drafting_begins_again_when_it_pays_again)."""

_OFTEN, _SELDOM = 7, 128
"""Number of steps between plain ones until the correction of the shape in use is known, and from
then on. As many comparisons are kept, whose median is the correction
(test_costs_that_are_wrong_at_some_rows_are_found_out_within_forty_steps,
test_a_change_of_what_drafts_cost_is_noticed), and as seldom one of what seemed too expensive is
forgotten (test_what_was_dear_is_tried_again_after_some_hundred_steps)."""

_DOUBT = 0.6
"""Share by which a step may take longer than is assumed, until such were timed; and of a plain
step, by which a process's first step with a number of query rows does, as its graph is compiled
(test_no_answer_with_a_fresh_cache_is_slower_than_plain_decoding_by_over_three_percent)."""

_HOST_BUILDS = 0.4
"""Share of a plain step that the device waits where the host builds a step after reading: such
steps, and a single draft among plain ones, cost as much more
(test_useless_drafts_that_seem_nearly_free_cost_little)."""

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
        self._recent: deque[tuple[int, float]] = deque(maxlen=2 * COMPARED)
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
            if len(relative) >= COMPARED:
                self._ratios.setdefault(of, deque(maxlen=_OFTEN)).append(median(relative))
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

        One that was not timed, as it compiled its graph, is repeated once. None is due where no
        steps are timed.
        """
        self._since_plain += 1
        if self._repeat:
            self._repeat = False
            return True
        known = kind in self.factors and (kind != _PLAIN or len(self.factors) > 1)
        if self._since_plain <= (_SELDOM if known else _OFTEN) or self._untimed > COMPARED:
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
        """Go on with another process's comparisons."""
        self._ratios = {kind: deque(ratios, _OFTEN) for kind, ratios in by_kind}
        self._timed = timed
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
    """Corrections for all batch sizes, taken together up to each power of two: 1, 2, 3 to 4, ...

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
        """Read a record that `to_record` wrote."""
        found = cls()
        for number, (timed, ratios) in record.items():
            found._by_class[int(number)].restore(timed, ratios)
        return found


class StepCosts:
    """What a step of each shape costs, after a text of some length, in a batch of some size.

    times:   corrections for batches of this size
    seconds: [S] corrected, in the order of the shapes; plain decoding is the first
    doubts:  [S] factors by which they may take longer
    late:    seconds that the device waits where the host builds a step after reading
    rows:    [S] query rows of each shape's trees
    assumed: whether costs are
    max_nodes: maximum nodes of a tree
    nothing_is_known: whether costs are assumed, and no drafted step has shown what one takes
    """

    def __init__(
        self, shapes: tuple[BeamShape, ...], costs: CostModel, corrections: Corrections
    ) -> None:
        self.rows = [shape.nodes for shape in shapes]
        self.numbers = {shape: i for i, shape in enumerate(shapes)}
        self._shapes, self._costs, self._corrections = shapes, costs, corrections
        self.assumed, self.max_nodes = costs.assumed, costs.max_nodes
        self._context = self._batch = 0
        self._factors: dict[int, float] = {}  # that `seconds` are corrected by

    def look_up(self, length: int, batch: int) -> None:
        """Find the costs after up to the next power of two of tokens, in a batch of this size."""
        context = 1 << (length - 1).bit_length()
        if changed := (context, batch) != (self._context, self._batch):
            self._context, self._batch = context, batch
            self.times = self._corrections.of(batch)
            self._predicted = self._costs.steps(self._shapes, context, batch)
            self._after_reading: dict[int, float] = {}  # by nodes
        if changed or self.times.factors is not self._factors:
            known = self._factors = self.times.factors
            # Costs of one sequence that were measured are certain; those of batches are less so.
            doubt = 1 + _DOUBT if batch > 1 or self.assumed else 1.0
            factors = [known.get(n, self.times.others) for n in self.rows]
            self.seconds: Array = self._predicted * factors
            self.late = _HOST_BUILDS * float(self.seconds[0])
            self.doubts = np.array([1.0 if n in known else doubt for n in self.rows])
            self.nothing_is_known = self.assumed and bool((self.doubts[1:] > 1).all())

    def max_seconds(self, number: int) -> float:
        """Return the most seconds that a step of a shape may take: it may have to be compiled."""
        compiles = self.rows[number] not in self.times.used
        longest = float(self.seconds[number] * self.doubts[number])
        return longest + compiles * _DOUBT * float(self.seconds[0])

    def learn(self, step: StepResult, batch: int) -> bool:
        """Record a step without continuations; return whether that changed a correction."""
        if batch == self._batch:
            return self.times.learn(step.query_rows, self._step(step.shape), step.seconds)
        predicted = self._costs.step(step.shape, self._context, batch)
        return self._corrections.of(batch).learn(step.query_rows, predicted, step.seconds)

    def is_sure_of(self, nodes: int) -> bool:
        """Whether it is known what a step with so many nodes takes that is built after reading."""
        return not self.assumed or waited(nodes) in self.times.factors

    def after_reading(self, nodes: int) -> float:
        """Return the predicted seconds of a step that is built after reading and drafts nothing."""
        found = self._after_reading.get(nodes)
        if found is None:
            found = self._costs.verify(nodes, self._context, self._batch)
            found += _HOST_BUILDS * float(self._predicted[0])
            self._after_reading[nodes] = found
        return found

    def revised(self, nodes: int) -> float:
        """Return the most seconds of such a step, corrected."""
        doubt = 1 + _DOUBT if self.assumed else 1.0
        return self.after_reading(nodes) * self.times.factors.get(waited(nodes), doubt)

    def drafting(self, shape: BeamShape) -> float:
        """Return the predicted seconds of a step's drafting."""
        return self._costs.drafting(shape.width, shape.length, self._batch)

    def without_drafting(self, shape: BeamShape) -> float:
        """Return the corrected seconds of a step whose drafts exist already."""
        called = self._costs.verify(shape.nodes, self._context, self._batch)
        return called * self.times.correction(shape.nodes)

    def _step(self, shape: BeamShape) -> float:
        """Return the predicted seconds of a step."""
        number = self.numbers.get(shape)
        if number is None:
            return self._costs.step(shape, self._context, self._batch)
        return float(self._predicted[number])
