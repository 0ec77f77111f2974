"""Seconds of a batch's steps: the cost model's, corrected by what steps took."""

from __future__ import annotations

from collections import abc

import numpy as np

from redrafter_mlx.config import BeamShape
from redrafter_mlx.tuning.acceptance import Array
from redrafter_mlx.tuning.corrections import Corrections, kind_of
from redrafter_mlx.tuning.cost import CostModel

_DOUBT = 1.5
"""Factor by which a step may take longer than is assumed, until such steps were timed: the first
answers are not slower for drafts that cost so much (test_first_answers)."""

_COMPILING = 0.6
"""Share of a plain step by which a process's first step with a number of query rows takes longer,
as its graph is compiled (test_first_answers)."""

HOST_BUILDS = 0.4
"""Share of a plain step that the device waits where the host builds a step after reading: such
steps, and a single draft among plain ones, cost as much more (test_copy_costs, test_shape)."""


class StepCosts:
    """What a step of each shape costs, after a text of some length, in a batch of some size.

    times:   corrections for batches of this size
    seconds: [S] corrected, in the order of the shapes; plain decoding is the first
    doubts:  [S] factors by which they may take longer
    rows:    [S] query rows of each shape's trees
    """

    def __init__(
        self, shapes: abc.Sequence[BeamShape], costs: CostModel, corrections: Corrections
    ) -> None:
        self.rows = [shape.nodes for shape in shapes]
        self.numbers = {shape: i for i, shape in enumerate(shapes)}
        self._shapes, self._costs, self._corrections = shapes, costs, corrections
        self._length = self._batch = 0

    def look_up(self, length: int, batch: int) -> None:
        """Find the costs after `length` tokens, in a batch of this size."""
        costs = self._costs
        if batch != self._batch:
            self._batch, self.times = batch, self._corrections.of(batch)
            self._short = np.array([costs.step(s, 0, batch) for s in self._shapes])
            at = costs.long_context / batch
            self._longer = np.array([costs.step(s, at, batch) for s in self._shapes]) - self._short
        self._length, known, others = length, self.times.factors, self.times.others
        share = (batch * length - costs.short_context) / (costs.long_context - costs.short_context)
        self._predicted: Array = self._short + max(share, 0.0) * self._longer
        self.seconds = self._predicted * np.array([known.get(n, others) for n in self.rows])
        # Costs of one sequence that were measured are certain; those of batches are less so.
        certain = batch == 1 and not costs.assumed
        self.doubts = np.array([1.0 if certain or n in known else _DOUBT for n in self.rows])

    @property
    def plain_seconds(self) -> float:
        """Corrected seconds of a plain step."""
        return float(self.seconds[0])

    def most(self, number: int) -> float:
        """Return the most seconds that a step of a shape may take: it may have to be compiled."""
        compiles = self.rows[number] not in self.times.used
        most = float(self.seconds[number] * self.doubts[number])
        return most + compiles * _COMPILING * self.plain_seconds

    def learn(self, shape: BeamShape, batch: int, rows: int, seconds: float | None) -> bool:
        """Record a step; return whether that changed a correction."""
        number = self.numbers.get(shape)
        if number is None or batch != self._batch:
            predicted = self._costs.step(shape, self._length, batch)
        else:
            predicted = float(self._predicted[number])
        return self._corrections.of(batch).learn(rows, predicted, seconds)

    @property
    def nothing_is_known(self) -> bool:
        """Whether costs are assumed, and no drafted step has shown yet what one takes."""
        return self._costs.assumed and bool((self.doubts[1:] > 1).all())

    @property
    def host_builds(self) -> float:
        """Seconds that the device waits where the host builds a step after reading."""
        return HOST_BUILDS * self.plain_seconds

    def is_sure_of(self, nodes: int) -> bool:
        """Whether it is known what a step with so many nodes takes that is built after reading."""
        return not self._costs.assumed or self.times.known(kind_of(nodes, waited=True))

    def after_reading(self, nodes: int, width: int) -> float:
        """Return the predicted seconds of a step that is built after reading and drafts nothing."""
        call = self._costs.verify(nodes, self._length, self._batch)
        return call + self._costs.overhead(width) + HOST_BUILDS * float(self._predicted[0])

    def revised(self, nodes: int, width: int) -> float:
        """Return the most seconds of such a step, corrected."""
        doubt = 1.0 if self.is_sure_of(nodes) else _DOUBT
        correction = self.times.correction(kind_of(nodes, waited=True))
        return self.after_reading(nodes, width) * correction * doubt

    def drafting(self, shape: BeamShape) -> float:
        """Return the predicted seconds of a step's drafting."""
        return self._costs.drafting(shape.width, shape.length, self._batch)

    def without_drafting(self, shape: BeamShape) -> float:
        """Return the corrected seconds of a step whose drafts exist already."""
        seconds = self._costs.step(shape, self._length, self._batch)
        return (seconds - self.drafting(shape)) * self.times.correction(shape.nodes)
