"""Decode one sequence with a policy that chooses the shape of each step, for tests of decoding."""

from __future__ import annotations

from collections import abc

from redrafter_mlx.config import BeamShape
from redrafter_mlx.decoding.sequence import Proposal, Sequence


class Alternating:
    """A policy that repeats a sequence of shapes, and plans no copies."""

    def __init__(self, *shapes: BeamShape) -> None:
        self.shapes, self.step = shapes, 0

    def propose(self, rows: abc.Sequence[Sequence]) -> Proposal:
        del rows
        self.step += 1
        return Proposal(self.shapes[self.step % len(self.shapes)])

    def revise(self, rows: abc.Sequence[Sequence], *_: object) -> list[Proposal | None]:
        return [None] * len(rows)

    def may_revise(self, rows: abc.Sequence[Sequence]) -> bool:
        del rows
        return False

    def learn(self, *_: object) -> None: ...
