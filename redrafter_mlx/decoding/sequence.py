"""One text being generated, as the host sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from redrafter_mlx.decoding.constraint import Constraint, with_forced
from redrafter_mlx.drafting.continuation import Continuation
from redrafter_mlx.drafting.ngram import NgramIndex
from redrafter_mlx.response import StepResult


@dataclass(eq=False)
class Sequence:
    """One text being generated, as the host sees it.

    finished:   called once with each result; True ends the sequence
    committed:  number of tokens in the cache
    ngrams:     index of its text for prompt lookup; None without it
    constraint: which tokens may come next; `finished` advances it
    ends_next:  whether it is known to end with the next token
    biased:     whether a grammar or penalties change what is accepted
    fresh:      whether its prompt's result is unread
    done:       whether it has ended, or is to be removed
    left:       whether its cache was taken, although the step that was submitted has a row for it
    """

    finished: Callable[[StepResult], bool]
    committed: int
    ngrams: NgramIndex | None = None
    constraint: Constraint | None = None
    ends_next: Callable[[], bool] = lambda: False
    biased: bool = False
    fresh: bool = True
    done: bool = False
    left: bool = False

    def continuations(self, width: int, length: int) -> list[Continuation]:
        """Return up to `width` continuations of `length` drafts, the best first.

        If a grammar forces tokens, the only one starts with them.
        """
        found = [] if self.ngrams is None else self.ngrams.continuations(width, length)
        return found if self.constraint is None else with_forced(self.constraint, found, length)

    def next_continuation(self, length: int) -> Continuation | None:
        """Return the most trusted continuation that the next token can lead to; None if none can.

        Its `length` drafts are not known yet, and 0.
        """
        return None if self.ngrams is None else self.ngrams.next_continuation(length)
