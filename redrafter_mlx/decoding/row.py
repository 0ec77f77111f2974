"""One sequence of a batch, as the host sees it, and the policies that choose its drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

from redrafter_mlx.config import PLAIN, BeamShape
from redrafter_mlx.decoding.constraint import Constraint, ForcedCopies
from redrafter_mlx.decoding.copies import CopyPlan
from redrafter_mlx.decoding.step_result import StepResult
from redrafter_mlx.drafting.prompt_lookup import CopySource, TextIndex

_MOST_COPIES = 2
"""Maximum number of copies next to the drafter's branches: further ones are seldom right."""


@dataclass(eq=False)
class Row:
    """One sequence of a batch, as the host sees it.

    finished:   called once with each result; True ends the sequence
    committed:  number of tokens in the cache
    text_index: for prompt lookup; None without it
    constraint: which tokens may come next; `finished` advances it
    ends_next:  whether it is known to end with the next token
    learns:     whether acceptance statistics may learn from it
    fresh:      whether its prompt's result is unread
    done:       whether it has ended, or is to be removed
    left:       whether its cache was taken, although the step that was submitted has a row for it
    """

    finished: Callable[[StepResult], bool]
    committed: int
    text_index: TextIndex | None = None
    constraint: Constraint | None = None
    ends_next: Callable[[], bool] = lambda: False
    learns: bool = True
    fresh: bool = True
    done: bool = False
    left: bool = False

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
        """Return the copies to verify now in each row; None leaves its tree as it was drafted.

        Args:
          drafted: the shape of each drafted tree, PLAIN if nothing was drafted
          drawn: whether its drafts were sampled for rejection, so that no copy may join them
        """
        ...

    def may_copy(self, rows: Sequence[Row]) -> bool:
        """Whether copies may be planned in place of plain trees, after one more token each."""
        ...

    def learn(self, rows: Sequence[Row], steps: Sequence[StepResult]) -> None:
        """Record the results of a step; seconds are NaN if other work ran at the same time."""
        ...


class FixedShape:
    """The same shape in every step, regardless of its cost."""

    def __init__(self, shape: BeamShape) -> None:
        self._shape = shape
        # Of each row's steps without copies: their number, and that of their accepted drafts.
        self._counts: WeakKeyDictionary[Row, tuple[float, float]] = WeakKeyDictionary()

    def next_shape(self, rows: Sequence[Row]) -> BeamShape:
        del rows
        return self._shape

    def plan_copies(
        self, rows: Sequence[Row], drafted: Sequence[BeamShape], drawn: Sequence[bool]
    ) -> list[CopyPlan | None]:
        """Plan copies within the shape's own width, length and nodes."""
        return [self._plan(*one) for one in zip(rows, drafted, drawn, strict=True)]

    def may_copy(self, rows: Sequence[Row]) -> bool:
        indices = [row.text_index for row in rows if row.text_index is not None]
        return self._shape.length > 1 and any(index.next_copy(1) for index in indices)

    def learn(self, rows: Sequence[Row], steps: Sequence[StepResult]) -> None:
        for row, step in zip(rows, steps, strict=True):
            if not step.copied:
                count, accepted = self._count(row)
                self._counts[row] = count + 1, accepted + len(step.path) - 1

    def _plan(self, row: Row, drafted: BeamShape, drawn: bool) -> CopyPlan | None:
        W, L, source = self._shape.width, self._shape.length, row.copy_source
        if L == 1 or source is None:
            return None
        joined = drafted != PLAIN and not drawn
        copies = source.copies(min(max(W // 2, 1), _MOST_COPIES) if joined else W, L - 1)
        count, accepted = self._count(row)
        if not copies or (drawn and copies[0].expected * count <= accepted):
            return None
        return CopyPlan(copies, self._shape, joined)

    def _count(self, row: Row) -> tuple[float, float]:
        return self._counts.get(row, (1.0, 1.0))
