"""One sequence of a batch, as the host knows it, and who chooses what is drafted for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from redrafter_mlx.config import PLAIN, BeamShape
from redrafter_mlx.decoding.constraint import Constraint, ForcedCopies
from redrafter_mlx.decoding.copies import CopyPlan, Shapes
from redrafter_mlx.decoding.step_result import StepResult
from redrafter_mlx.drafting.prompt_lookup import CopySource, TextIndex


@dataclass(eq=False)
class Row:
    """One sequence of a batch, as the host knows it.

    finished:  told each result once; True ends the sequence
    committed: tokens in the cache
    text:      for prompt lookup; None without it
    shapes:    chooses for this row alone; None where the batch's policy does
    constraint: what may come next; `finished` advances it
    learns:    whether acceptance statistics may learn from it
    fresh:     the result of its prompt was not read yet
    done:      it has ended, or was told to
    """

    finished: Callable[[StepResult], bool]
    committed: int
    text: TextIndex | None = None
    shapes: Shapes | None = None
    constraint: Constraint | None = None
    learns: bool = True
    fresh: bool = True
    done: bool = False

    @property
    def index(self) -> CopySource | None:
        """What copies come from; None without them."""
        return self.text if self.constraint is None else ForcedCopies(self.constraint, self.text)


class BatchShapes(Protocol):
    """Chooses the shape of the drafts step by step, for all rows of a batch."""

    def next_shape(self, rows: Sequence[Row]) -> BeamShape:
        """The shape to draft with, the same for all rows."""
        ...

    def plan_copies(
        self, rows: Sequence[Row], drafted: Sequence[BeamShape], drawn: Sequence[bool]
    ) -> Sequence[CopyPlan | None]:
        """The copies to verify now in each row; see `Shapes.plan_copies`."""
        ...

    def learn(self, rows: Sequence[Row], steps: Sequence[StepResult]) -> None:
        """Take note of a step that was read; seconds are NaN where something else ran meanwhile."""
        ...


class OwnShapes:
    """Each row plans its own copies; the first row's shape is that of all."""

    def next_shape(self, rows: Sequence[Row]) -> BeamShape:
        shape = PLAIN
        for row in reversed(rows):
            shape = PLAIN if row.shapes is None else row.shapes.next_shape(row.committed)
        return shape

    def plan_copies(
        self, rows: Sequence[Row], drafted: Sequence[BeamShape], drawn: Sequence[bool]
    ) -> Sequence[CopyPlan | None]:
        return [
            None
            if row.shapes is None or (index := row.index) is None
            else row.shapes.plan_copies(index, shape, was_drawn)
            for row, shape, was_drawn in zip(rows, drafted, drawn, strict=True)
        ]

    def learn(self, rows: Sequence[Row], steps: Sequence[StepResult]) -> None:
        for row, step in zip(rows, steps, strict=True):
            if row.shapes is not None:
                row.shapes.learn(step)
