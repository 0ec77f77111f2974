"""Seconds of a batch's steps: the cost model's, corrected by what steps took."""

from __future__ import annotations

from collections import abc

import numpy as np

from redrafter_mlx.config import PLAIN, BeamShape
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

_CONTEXT_STEP = 64
"""Number of tokens after which costs are updated; they change by a few percent in 2,000 tokens."""


class ShapeCosts:
    """What a step of each shape costs, after a text of some length, in a batch of some size.

    batch:   number of sequences
    times:   corrections for batches of this size
    seconds: [S] predicted and corrected, in the order of the shapes; plain decoding is the first
    doubts:  [S] factors by which they may take longer
    rows:    [S] query rows of each shape's trees
    """

    def __init__(
        self, shapes: abc.Sequence[BeamShape], costs: CostModel, corrections: Corrections
    ) -> None:
        self.rows = [shape.nodes for shape in shapes]
        self.batch, self.times = 0, corrections.of(1)
        self.assumed, self.max_nodes = costs.assumed, costs.max_nodes
        self._shapes, self._costs, self._corrections = shapes, costs, corrections
        self._numbers = {shape: i for i, shape in enumerate(shapes)}
        counts, self._of_count = np.unique(self.rows, return_inverse=True)
        self._counts: list[int] = counts.tolist()
        self._context = self._corrected = -1

    def look_up(self, length: int, batch: int) -> bool:
        """Look up the costs after `length` tokens; return whether there are new ones."""
        context = length // _CONTEXT_STEP
        if batch == self.batch and context == self._context:
            return False
        costs = self._costs
        if batch != self.batch:
            self.batch, self.times = batch, self._corrections.of(batch)
            self._short = np.array([costs.step(s, 0, batch) for s in self._shapes])
            at = costs.long_context / batch
            self._longer = np.array([costs.step(s, at, batch) for s in self._shapes]) - self._short
        self._context, self._corrected = context, -1
        beyond = batch * length - costs.short_context
        share = max(beyond / (costs.long_context - costs.short_context), 0.0)
        self._predicted: Array = self._short + share * self._longer
        return True

    def correct(self) -> None:
        """Correct the predicted seconds by the measured ones, where either have changed."""
        times, of_count = self.times, self._of_count
        if self._corrected == times.version:
            return
        self._corrected = times.version
        factors = np.array([times.correction(n) for n in self._counts])
        self.seconds: Array = self._predicted * factors[of_count]
        # Costs of one sequence that were measured are certain; those of batches are less so.
        certain = self.batch == 1 and not self.assumed
        doubts = [1.0 if certain or times.known(n) else _DOUBT for n in self._counts]
        self.doubts: Array = np.array(doubts)[of_count]

    @property
    def plain_seconds(self) -> float:
        """Corrected seconds of a plain step."""
        return float(self.seconds[0])

    @property
    def unknown(self) -> bool:
        """Whether costs are assumed, and no drafted step has shown yet what one takes."""
        return self.assumed and float(self.doubts[1:].min(initial=_DOUBT)) > 1

    def most(self, number: int) -> float:
        """Return the most seconds that a step of a shape may take: it may have to be compiled."""
        new = self.rows[number] not in self.times.used
        most = float(self.seconds[number] * self.doubts[number])
        return most + (_COMPILING * self.plain_seconds if new else 0.0)

    def learn(self, shape: BeamShape, batch: int, rows: int, seconds: float | None) -> bool:
        """Record a step; return whether that changed a correction."""
        number = self._numbers.get(shape)
        if number is None or batch != self.batch:
            predicted = self._costs.step(shape, self._context * _CONTEXT_STEP, batch)
        else:
            predicted = float(self._predicted[number])
        return self._corrections.of(batch).learn(rows, predicted, seconds)

    def after_reading(self, nodes: int, width: int) -> float:
        """Return the predicted seconds of a step that is built after reading and drafts nothing."""
        call = self._costs.verify(nodes, self._context * _CONTEXT_STEP, self.batch)
        return call + self._costs.overhead(width) + HOST_BUILDS * float(self._predicted[0])

    def revised(self, nodes: int, width: int) -> float:
        """Return the most seconds of such a step, corrected."""
        kind = kind_of(nodes, waited=True)
        doubt = _DOUBT if self.assumed and not self.times.known(kind) else 1.0
        return self.after_reading(nodes, width) * self.times.correction(kind) * doubt

    def drafting(self, shape: BeamShape) -> float:
        """Return the predicted seconds of a step's drafting."""
        return self._costs.drafting(shape.width, shape.length, self.batch)

    def without_drafting(self, shape: BeamShape) -> float:
        """Return the corrected seconds of a step whose drafts exist already."""
        seconds = self._costs.step(shape, self._context * _CONTEXT_STEP, self.batch)
        return (seconds - self.drafting(shape)) * self.times.correction(shape.nodes)

    def price(self, probed: int, used: int) -> float:
        """Return by how much a probe may take longer than a step of the shape in use."""
        price = self.most(probed) - float(self.seconds[used])
        alone = self._shapes[used] == PLAIN
        return max(price, HOST_BUILDS * self.plain_seconds) if alone else price
