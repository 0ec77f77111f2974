"""Seconds of a batch's steps: the cost model's, corrected by what steps took."""

from __future__ import annotations

import numpy as np

from redrafter_mlx.config import BeamShape
from redrafter_mlx.response import StepResult
from redrafter_mlx.tuning.corrections import Corrections, waited
from redrafter_mlx.tuning.cost import Array, CostModel

_DOUBT = 1.5
"""Factor by which a step may take longer than is assumed, until such steps were timed
(test_no_answer_with_a_fresh_cache_is_slower_than_plain_decoding_by_over_three_percent)."""

_COMPILING = 0.6
"""Share of a plain step by which a process's first step with a number of query rows takes longer,
as its graph is compiled (the same law)."""

_HOST_BUILDS = 0.4
"""Share of a plain step that the device waits where the host builds a step after reading: such
steps, and a single draft among plain ones, cost as much more
(test_useless_drafts_that_seem_nearly_free_cost_little)."""


class StepCosts:
    """What a step of each shape costs, after a text of some length, in a batch of some size.

    times:   corrections for batches of this size
    seconds: [S] corrected, in the order of the shapes; plain decoding is the first
    doubts:  [S] factors by which they may take longer
    rows:    [S] query rows of each shape's trees
    assumed: whether costs are
    nothing_is_known: whether costs are assumed, and no drafted step has shown what one takes
    """

    def __init__(
        self, shapes: tuple[BeamShape, ...], costs: CostModel, corrections: Corrections
    ) -> None:
        self.rows = [shape.nodes for shape in shapes]
        self.numbers = {shape: i for i, shape in enumerate(shapes)}
        self._shapes, self._costs, self._corrections = shapes, costs, corrections
        self.assumed = costs.assumed
        self._context = self._batch = 0
        self._factors: dict[int, float] = {}  # that `seconds` are corrected by

    def look_up(self, length: int, batch: int) -> None:
        """Find the costs after `length` tokens, in a batch of this size.

        Lengths count up to the next power of two, so that few are looked up in the cost model.
        """
        context = 1 << (length - 1).bit_length()
        if changed := (context, batch) != (self._context, self._batch):
            self._context, self._batch = context, batch
            self.times = self._corrections.of(batch)
            self._predicted = self._costs.steps(self._shapes, context, batch)
            self._after_reading: dict[tuple[int, int], float] = {}
        if changed or self.times.factors is not self._factors:
            known = self._factors = self.times.factors
            # Costs of one sequence that were measured are certain; those of batches are less so.
            doubt = _DOUBT if batch > 1 or self.assumed else 1.0
            factors = [known.get(n, self.times.others) for n in self.rows]
            self.seconds: Array = self._predicted * factors
            self.doubts = np.array([1.0 if n in known else doubt for n in self.rows])
            self.nothing_is_known = self.assumed and bool((self.doubts[1:] > 1).all())

    def max_seconds(self, number: int) -> float:
        """Return the most seconds that a step of a shape may take: it may have to be compiled."""
        compiles = self.rows[number] not in self.times.used
        longest = float(self.seconds[number] * self.doubts[number])
        return longest + compiles * _COMPILING * float(self.seconds[0])

    def learn(self, step: StepResult, batch: int) -> bool:
        """Record a step without continuations; return whether that changed a correction."""
        if batch == self._batch:
            return self.times.learn(step.query_rows, self._step(step.shape), step.seconds)
        predicted = self._costs.step(step.shape, self._context, batch)
        return self._corrections.of(batch).learn(step.query_rows, predicted, step.seconds)

    @property
    def host_builds(self) -> float:
        """Seconds that the device waits where the host builds a step after reading."""
        return _HOST_BUILDS * float(self.seconds[0])

    def is_sure_of(self, nodes: int) -> bool:
        """Whether it is known what a step with so many nodes takes that is built after reading."""
        return not self.assumed or waited(nodes) in self.times.factors

    def after_reading(self, nodes: int, width: int) -> float:
        """Return the predicted seconds of a step that is built after reading and drafts nothing."""
        found = self._after_reading.get((nodes, width))
        if found is None:
            found = self._costs.verify(nodes, self._context, self._batch)
            found += self._costs.overhead(width) + _HOST_BUILDS * float(self._predicted[0])
            self._after_reading[nodes, width] = found
        return found

    def revised(self, nodes: int, width: int) -> float:
        """Return the most seconds of such a step, corrected."""
        doubt = _DOUBT if self.assumed else 1.0
        return self.after_reading(nodes, width) * self.times.factors.get(waited(nodes), doubt)

    def drafting(self, shape: BeamShape) -> float:
        """Return the predicted seconds of a step's drafting."""
        return self._costs.drafting(shape.width, shape.length, self._batch)

    def without_drafting(self, shape: BeamShape) -> float:
        """Return the corrected seconds of a step whose drafts exist already."""
        seconds = self._step(shape) - self.drafting(shape)
        return seconds * self.times.correction(shape.nodes)

    def _step(self, shape: BeamShape) -> float:
        """Return the predicted seconds of a step."""
        number = self.numbers.get(shape)
        if number is None:
            return self._costs.step(shape, self._context, self._batch)
        return float(self._predicted[number])
