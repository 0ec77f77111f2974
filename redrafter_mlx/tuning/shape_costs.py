"""Seconds of a batch's steps by shape: the cost model's, corrected by measured step times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from redrafter_mlx.config import PLAIN, BeamShape
from redrafter_mlx.tuning.acceptance import Array
from redrafter_mlx.tuning.cost_model import CostModel
from redrafter_mlx.tuning.step_times import StepTimes

Mask = NDArray[np.bool_]

_CONTEXT_STEP = 64
"""Number of tokens after which costs are updated; they change by a few percent in 2,000 tokens."""


_UNTIMED_FACTOR, _ASSUMED_FACTOR = 1.2, 1.5
"""Factors on a step's modelled cost until some of its kind are timed: where its parts are measured,
and where they are assumed for this kind of machine."""


_FIRST_USE = 0.6
"""Share of a plain step by which a process's first step with a number of query rows takes longer:
its graphs are compiled."""


class ShapeCosts:
    """What a step of each shape costs, after a text of some length, in a batch of some rows.

    batch:   rows of the batch
    seconds: [S] predicted and corrected, in the order of the shapes
    """

    def __init__(self, shapes: Sequence[BeamShape], costs: CostModel, times: StepTimes) -> None:
        self.batch, self.seconds = 1, np.zeros(len(shapes))
        self._shapes, self._costs, self._times = shapes, costs, times
        self._numbers = {shape: i for i, shape in enumerate(shapes)}
        self._counts, self._of_count = np.unique(
            [shape.nodes for shape in shapes], return_inverse=True
        )
        self._context = -1
        self._predicted = np.zeros(len(shapes))

    @property
    def most_nodes(self) -> int:
        return self._costs.most_nodes

    @property
    def assumed(self) -> bool:
        """Whether some of the costs are assumed."""
        return self._costs.assumed

    @property
    def unknown(self) -> bool:
        """Whether costs are assumed, and no drafted step has shown yet what one takes."""
        return self.assumed and not self.timed()[1:].any()

    @property
    def plain_seconds(self) -> float:
        """Corrected seconds of a plain step; plain decoding is the first shape."""
        return float(self.seconds[0])

    def look_up(self, length: int, batch: int) -> bool:
        """Look up the costs after `length` tokens; return whether there are new ones."""
        context = length // _CONTEXT_STEP
        if (context, batch) == (self._context, self.batch):
            return False
        self._context, self.batch = context, batch
        self._predicted = np.array([self._costs.step(s, length, batch) for s in self._shapes])
        self.correct()
        return True

    def correct(self) -> bool:
        """Correct the predicted seconds by the measured times; return whether that changed any."""
        times = self._times.of(self.batch)
        factors = [times.correction(n) for n in self._counts.tolist()]
        seconds: Array = self._predicted * np.array(factors)[self._of_count]
        changed = not np.array_equal(seconds, self.seconds)
        self.seconds = seconds
        return changed

    def timed(self) -> Mask:
        """Whether each shape's cost is certain: its steps were timed, or it has one query row."""
        timed = [n == PLAIN.nodes or self._is_certain(n) for n in self._counts.tolist()]
        return np.array(timed)[self._of_count]

    def highest(self) -> Array:
        """Return [S], the most seconds that a step of each shape may take, as far as is known."""
        factor = _ASSUMED_FACTOR if self._costs.assumed else _UNTIMED_FACTOR
        return self.seconds * np.where(self.timed(), 1.0, factor)

    def uncertain(self, nodes: int, seconds: float) -> float:
        """Return by how much longer a step of `nodes` may take than its assumed `seconds`.

        The first step of its kind compiles graphs, too. It is 0 where costs are measured.
        """
        assumed = self._costs.is_assumed(nodes, self.batch)
        new = assumed and not self._times.of(self.batch).used(nodes)
        return self.doubt(nodes, seconds) + (_FIRST_USE * self.plain_seconds if new else 0.0)

    def doubt(self, nodes: int, seconds: float) -> float:
        """Return the same without compilation."""
        known = self._times.of(self.batch).timed(nodes)
        if known or not self._costs.is_assumed(nodes, self.batch):
            return 0.0
        return (_ASSUMED_FACTOR - 1) * seconds

    def _is_certain(self, nodes: int) -> bool:
        times = self._times.of(self.batch)
        if self._costs.is_assumed(nodes, self.batch):
            return times.timed(nodes)
        return self.batch == 1 or times.known(nodes)

    def predicted(self, shape: BeamShape, batch: int) -> float:
        """Return the seconds of a step by the cost model alone."""
        number = self._numbers.get(shape)
        if number is None or batch != self.batch:
            return self._costs.step(shape, self._context * _CONTEXT_STEP, batch)
        return float(self._predicted[number])

    def verification(self, nodes: int, width: int) -> float:
        """Return the seconds of a step that drafts nothing, by the cost model alone."""
        context = self._context * _CONTEXT_STEP
        return self._costs.verify(nodes, context, self.batch) + self._costs.overhead(width)

    def drafting(self, shape: BeamShape, batch: int) -> float:
        """Return the seconds of a step's drafting, corrected like those of the whole step."""
        seconds = self._costs.drafting(shape.width, shape.length, batch)
        return seconds * self._times.of(batch).correction(shape.nodes)

    def without_drafting(self, shape: BeamShape) -> float:
        """Return the corrected seconds of a step whose drafts exist already."""
        seconds = self.predicted(shape, self.batch)
        seconds *= self._times.of(self.batch).correction(shape.nodes)
        return seconds - self.drafting(shape, self.batch)
