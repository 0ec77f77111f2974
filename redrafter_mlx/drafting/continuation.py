"""Continuations: drafts that the host knows, without a call of the device."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, Protocol

Kind = Literal["short match", "long match"]
"""Kinds of continuations that are accepted at different rates; each is trusted by itself."""

LONG_MATCH = 8
"""Number of matching tokens from which a match is long: such hold where short ones fail."""


class Continuation(NamedTuple):
    """One candidate for what follows the text, such as what followed its last tokens before.

    tokens:    the drafts after the root
    log_probs: of the same prefixes, cumulative
    matched:   number of tokens of the text that it was found by, up to the number compared
    """

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    matched: int = 0

    @property
    def kind(self) -> Kind:
        return "long match" if self.matched >= LONG_MATCH else "short match"

    @property
    def expected(self) -> float:
        """Expected number of accepted drafts."""
        return sum(math.exp(p) for p in self.log_probs)


class ContinuationSource(Protocol):
    """Finds continuations of one text."""

    def continuations(self, width: int, length: int) -> list[Continuation]:
        """Return up to `width` continuations of `length` drafts, the best first."""
        ...
