"""One text being generated, from its request to its end, as the host sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from redrafter_mlx.decoding.constraint import Constraint, with_forced
from redrafter_mlx.drafting.untrained.continuation import Continuation, ContinuationSource
from redrafter_mlx.response import StepResult


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
