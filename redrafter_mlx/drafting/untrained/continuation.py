"""Continuations: drafts that the host knows, without a call of the device."""

from __future__ import annotations

import math
from collections import abc
from typing import Literal, NamedTuple, Protocol

Kind = Literal["short match", "long match", "forced", "earlier"]
"""Kinds of continuations that are accepted at different rates; each is trusted by itself."""


class Continuation(NamedTuple):
    """One candidate for what follows the text, such as what followed its last tokens before.

    tokens:    the drafts after the root
    log_probs: of the same prefixes, cumulative
    kind:      whose acceptance record it belongs to
    limit:     maximum number of drafts that are worth their cost by what found them, however well
               others of the kind were accepted; None if all may be
    """

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    kind: Kind
    limit: int | None = None

    def first(self, drafts: int) -> Continuation:
        """Return its first drafts alone."""
        return self._replace(tokens=self.tokens[:drafts], log_probs=self.log_probs[:drafts])

    @property
    def expected(self) -> float:
        """Expected number of accepted drafts."""
        return sum(map(math.exp, self.log_probs))


class EarlierState(NamedTuple):
    """What a drafter on the host keeps of earlier texts.

    texts:  their tokens, the oldest text first
    trials: hits and trials of its matches, in the drafter's own order
    """

    texts: abc.Sequence[abc.Sequence[int]]
    trials: abc.Sequence[tuple[float, float]]


class KeepsEarlier(Protocol):
    """Keeps earlier texts, which can be kept on disk."""

    def state(self) -> EarlierState:
        """Return a copy of what is kept now."""
        ...

    def restore(self, state: EarlierState) -> None:
        """Take over what another process kept."""
        ...


class ContinuationSource(Protocol):
    """Finds continuations of one text, of which it is shown every token, in order."""

    def append(self, tokens: abc.Sequence[int]) -> None:
        """Add tokens that were given, not emitted."""
        ...

    def extend(self, tokens: abc.Sequence[int]) -> None:
        """Add emitted tokens."""
        ...

    def continuations(self, width: int, length: int) -> list[Continuation]:
        """Return up to `width` continuations of `length` drafts, the best first."""
        ...

    def next_continuation(self, length: int) -> Continuation | None:
        """Return the most trusted continuation that the next token can lead to; None if none can.

        Its `length` drafts are not known yet, and 0.
        """
        ...


class HostDrafter(Protocol):
    """Drafts on the host, from tokens alone, in the place of a drafter on the device or beside it.

    To add one, write one file with a class like this, and register it in `host_drafters`.
    """

    @property
    def name(self) -> str:
        """Short name for display and records."""
        ...

    @property
    def bytes_per_token(self) -> int:
        """Maximum host memory of a source, for each token of its text."""
        ...

    @property
    def kept_bytes(self) -> int:
        """Maximum host memory that it keeps of texts that have ended; 0 if it keeps none.

        A request that keeps nothing for others (`cache_prompt=False`) is drafted for without it.
        """
        ...

    @property
    def earlier(self) -> KeepsEarlier | None:
        """What keeps these texts; None if it keeps none."""
        ...

    def begin(self) -> ContinuationSource:
        """Return the source of a new text, which is empty so far."""
        ...
