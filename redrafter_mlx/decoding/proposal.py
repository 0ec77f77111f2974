"""Proposals: what the next tree may hold, and the policies that choose it.

before the host reads    the drafter's proposal, for all sequences: a shape, or PLAIN
after it has read        in its place or beside it, continuations that the host knows: what
                         followed an n-gram of the text before, tokens that a grammar forces
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from redrafter_mlx.config import PLAIN, BeamShape
from redrafter_mlx.decoding.sequence import Sequence
from redrafter_mlx.drafting.untrained.continuation import Continuation
from redrafter_mlx.response import StepResult

_MAX_BESIDE = 2
"""Maximum number of continuations beside the drafter's branches: further ones are seldom right."""


class Drafted(NamedTuple):
    """How the drafts of one sequence were made.

    shape:     shape that they were drafted with, PLAIN if nothing was drafted
    drawn:     whether they were drawn for rejection
    from_host: whether the tree holds continuations from the host
    """

    shape: BeamShape
    drawn: bool = False
    from_host: bool = False

    @property
    def joinable(self) -> bool:
        """Whether continuations may stand beside the drafts."""
        return self.shape != PLAIN and not self.drawn


@dataclass(frozen=True)
class Proposal:
    """What the next tree of a sequence may hold.

    shape:         of the tree: beams, length of the longest candidate, node capacity
    continuations: from the host, of one length, the most trusted first
    join:          whether the tree also holds the drafter's branches
    draft_after:   whether the drafter drafts for the step after this one
    """

    shape: BeamShape
    continuations: abc.Sequence[Continuation] = ()
    join: bool = False
    draft_after: bool = True


class Policy(Protocol):
    """Chooses what the sequences of a batch verify, step by step."""

    def propose(self, sequences: abc.Sequence[Sequence]) -> Proposal:
        """Return what the drafter drafts after this step, the same for all sequences."""
        ...

    def revise(
        self, sequences: abc.Sequence[Sequence], drafted: abc.Sequence[Drafted]
    ) -> abc.Sequence[Proposal | None]:
        """Return the continuations to verify now in each sequence, whose results have been read.

        None leaves the tree as it was drafted.
        """
        ...

    def may_revise(self, sequences: abc.Sequence[Sequence]) -> bool:
        """Whether plain trees may be revised after one more token each."""
        ...

    def learn(self, sequences: abc.Sequence[Sequence], steps: abc.Sequence[StepResult]) -> None:
        """Record the results of a step; its seconds are None if it was not timed."""
        ...


class FixedPolicy:
    """The same shape in every step, regardless of its cost."""

    def __init__(self, shape: BeamShape) -> None:
        self._proposal = Proposal(shape)
        # Of each sequence's drafted steps: their number, and that of their accepted drafts.
        self._counts: WeakKeyDictionary[Sequence, tuple[float, float]] = WeakKeyDictionary()

    def propose(self, sequences: abc.Sequence[Sequence]) -> Proposal:
        del sequences
        return self._proposal

    def revise(
        self, sequences: abc.Sequence[Sequence], drafted: abc.Sequence[Drafted]
    ) -> list[Proposal | None]:
        """Propose continuations within the shape's own width, length and nodes."""
        return [self._revised(*one) for one in zip(sequences, drafted, strict=True)]

    def may_revise(self, sequences: abc.Sequence[Sequence]) -> bool:
        if self._proposal.shape.length == 1:
            return False
        return any(sequence.next_continuation(1) for sequence in sequences)

    def learn(self, sequences: abc.Sequence[Sequence], steps: abc.Sequence[StepResult]) -> None:
        for sequence, step in zip(sequences, steps, strict=True):
            if not step.from_host:
                count, accepted = self._counts.get(sequence, (1.0, 1.0))
                self._counts[sequence] = count + 1, accepted + len(step.path) - 1

    def _revised(self, sequence: Sequence, drafted: Drafted) -> Proposal | None:
        """Return a sequence's continuations; drawn drafts give way to those that promise more."""
        shape = self._proposal.shape
        if shape.length == 1:
            return None
        width = min(max(shape.width // 2, 1), _MAX_BESIDE) if drafted.joinable else shape.width
        found = sequence.continuations(width, shape.length - 1)
        count, accepted = self._counts.get(sequence, (1.0, 1.0))
        if not found or (drafted.drawn and found[0].expected * count <= accepted):
            return None
        return Proposal(shape, found, drafted.joinable)
