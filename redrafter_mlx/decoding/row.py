"""One sequence of a batch, as the host sees it, and the policies that choose its drafts."""

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
    """One sequence of a batch, as the host sees it.

    finished:   called once with each result; True ends the sequence
    committed:  number of tokens in the cache
    text_index: for prompt lookup; None without it
    shapes:     chooses shapes for this row alone; None if the batch's policy does
    constraint: which tokens may come next; `finished` advances it
    learns:     whether acceptance statistics may learn from it
    fresh:      whether its prompt's result is unread
    done:       whether it has ended, or is to be removed
    """

    finished: Callable[[StepResult], bool]
    committed: int
    text_index: TextIndex | None = None
    shapes: Shapes | None = None
    constraint: Constraint | None = None
    learns: bool = True
    fresh: bool = True
    done: bool = False

    @property
    def copy_source(self) -> CopySource | None:
        """Source of copies, forced tokens included; None if there is none."""
        if self.constraint is None:
            return self.text_index
        return ForcedCopies(self.constraint, self.text_index)


class BatchShapes(Protocol):
    """Chooses the shape of the drafts step by step, for all rows of a batch."""

    def next_shape(self, rows: Sequence[Row]) -> BeamShape:
        """Return the shape to draft with, the same for all rows."""
        ...

    def plan_copies(
        self, rows: Sequence[Row], drafted: Sequence[BeamShape], drawn: Sequence[bool]
    ) -> Sequence[CopyPlan | None]:
        """Return the copies to verify now in each row; see `Shapes.plan_copies`."""
        ...

    def learn(self, rows: Sequence[Row], steps: Sequence[StepResult]) -> None:
        """Record the results of a step; seconds are NaN if other work ran at the same time."""
        ...


class OwnShapes:
    """Each row plans its own copies; all rows draft with the first row's shape."""

    def next_shape(self, rows: Sequence[Row]) -> BeamShape:
        first = rows[0]
        return PLAIN if first.shapes is None else first.shapes.next_shape(first.committed)

    def plan_copies(
        self, rows: Sequence[Row], drafted: Sequence[BeamShape], drawn: Sequence[bool]
    ) -> Sequence[CopyPlan | None]:
        return [
            None
            if row.shapes is None or (source := row.copy_source) is None
            else row.shapes.plan_copies(source, shape, was_drawn)
            for row, shape, was_drawn in zip(rows, drafted, drawn, strict=True)
        ]

    def learn(self, rows: Sequence[Row], steps: Sequence[StepResult]) -> None:
        for row, step in zip(rows, steps, strict=True):
            if row.shapes is not None:
                row.shapes.learn(step)
