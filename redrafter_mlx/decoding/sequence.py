"""One text being generated, as the host sees it, and the proposals for its next tree.

before the host reads    the drafter's proposal, for all sequences: a shape, or PLAIN
after it has read        in its place or beside it, continuations that the host knows: what
                         followed an n-gram of the text before, tokens that a grammar forces
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from redrafter_mlx.config import PLAIN, BeamShape
from redrafter_mlx.decoding.constraint import Constraint, with_forced
from redrafter_mlx.drafting.untrained.continuation import Continuation, ContinuationSource
from redrafter_mlx.response import StepResult

_MAX_BESIDE = 2
"""Maximum number of continuations beside the drafter's branches: further ones are seldom right."""


class Status(Enum):
    """Where a sequence is between its request and its end.

    WAITING:  for room in memory, or for its turn
    PREFILL:  its prompt is read, or its first token is not read by the host yet
    RUNNING:  it takes steps
    PAUSED:   it takes no steps until it is running again
    FINISHED: it has ended, or is to be removed
    """

    WAITING = "waiting"
    PREFILL = "prefill"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One text being generated.

    on_result:  called once with each result; returns whether the sequence has ended
    committed:  number of tokens in the cache
    sources:    where the host finds continuations of its text
    constraint: which tokens may come next; `on_result` advances it
    biased:     whether a grammar or penalties change what is accepted
    last_token: the last one emitted, the root of its next tree
    """

    on_result: Callable[[StepResult], bool]
    committed: int
    sources: tuple[ContinuationSource, ...] = ()
    constraint: Constraint | None = None
    biased: bool = False
    status: Status = Status.PREFILL
    last_token: int = -1

    @property
    def kept_length(self) -> int:
        """Number of tokens in the cache that its text has, once it has ended."""
        return self.committed

    @property
    def ends_next(self) -> bool:
        """Whether it is known to end with its next token."""
        return False

    def add(self, result: StepResult) -> None:
        """Add what a step has emitted; the first result is the prompt's."""
        if self.status is Status.PREFILL:
            self.status = Status.RUNNING  # and the token is the root of its first tree
        else:
            self.committed += len(result.tokens)
        self.last_token = result.tokens[-1]
        if self.on_result(result):
            self.status = Status.FINISHED
        for source in self.sources:
            source.extend(result.tokens)

    def continuations(self, width: int, length: int) -> list[Continuation]:
        """Return up to `width` continuations of `length` drafts, the best first.

        If a grammar forces tokens, the only one starts with them.
        """
        found = [one for each in self.sources for one in each.continuations(width, length)]
        if len(self.sources) > 1:
            found = sorted(found, key=lambda one: -one.expected)[:width]
        return found if self.constraint is None else with_forced(self.constraint, found, length)

    def next_continuation(self, length: int) -> Continuation | None:
        """Return the most trusted continuation that the next token can lead to; None if none can.

        Its `length` drafts are not known yet, and 0.
        """
        found = [one for each in self.sources if (one := each.next_continuation(length))]
        return max(found, key=lambda one: one.expected, default=None)


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
