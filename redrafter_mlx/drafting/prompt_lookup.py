"""Prompt lookup: where the text's last tokens stood before, what followed may follow again.

    text so far        the cat sat on the mat . then the cat | sat on the
    its last tokens    the cat
    where they stood   ^^^^^^^ sat on the mat                   -> drafts sat, on, the

Answers that quote (summaries, edits of code, extraction) repeat their question; those that loop
repeat themselves. The host has read every token of the text before it submits the next
verification, so it keeps an index of n-grams: a match costs microseconds and no work of the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from redrafter_mlx.errors import BadInputError

BESIDE_A_DRAFTER = 3
"""Tokens that must match where a drafter drafts too: shorter matches are right less often."""

_WORD, _SUFFIX = "lookup", "+lookup"

_PRIOR_TRIALS = 4.0
"""The rates of `Lookup.accepted` weigh as much as so many matches of the text at hand."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Lookup:
    """What counts as a match, and how much to trust it.

    shortest: fewer matching tokens are no match
    accepted: how often the token after 1, 2, ... matching tokens is the target's; the last for all
              longer ones, and matches are compared up to that length. An index begins with these
              rates and learns those of its own text
    second:   how much less often that is so for the next candidate than for the one before

    The rates are those counted on 34 answers of SmolLM2-135M-Instruct to MT-Bench's questions and
    to questions that ask for quotations; of one token, on short questions.
    """

    shortest: int = 2
    accepted: tuple[float, ...] = (0.20, 0.47, 0.59, 0.71, 0.81, 0.84, 0.84, 0.93)
    second: float = 0.35

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= len(self.accepted):
            raise BadInputError(
                f"shortest is {self.shortest}; it must be 1 to {len(self.accepted)}"
            )
        for name, rates in (("accepted", self.accepted), ("second", (self.second,))):
            if any(not 0 < rate <= 1 for rate in rates) or list(rates) != sorted(rates):
                raise BadInputError(f"{name} is {rates}; give rising shares above 0, up to 1")


class Copy(NamedTuple):
    """One candidate: what followed an earlier occurrence of the text's last tokens.

    tokens:    the drafts after the root
    log_probs: of the same prefixes, cumulative
    matched:   how many tokens matched, as far as they were compared
    """

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    matched: int = 0

    @property
    def expected(self) -> float:
        """How many of the drafts are expected to be accepted."""
        return sum(math.exp(p) for p in self.log_probs)


class CopySource(Protocol):
    """What copies come from: the text so far, see `TextIndex.copies`."""

    def copies(self, width: int, length: int) -> list[Copy]: ...


class TextIndex:
    """The text of one sequence, and where each n-gram of it stood.

    tokens: the text so far
    """

    def __init__(self, lookup: Lookup, tokens: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self._lookup = lookup
        self._ends: dict[tuple[int, ...], list[int]] = {}  # where an n-gram ended, rising
        self._hits = [_PRIOR_TRIALS * rate for rate in lookup.accepted]
        self._trials = [_PRIOR_TRIALS] * len(lookup.accepted)
        for token in tokens:
            self._append(token)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append what was emitted; each token also tells how good the match before it was."""
        for token in tokens:
            matches = self._matches(1, 1)
            if matches:
                ((place, length),) = matches
                self._trials[length - 1] += 1
                self._hits[length - 1] += self.tokens[place + 1] == token
            self._append(token)

    def copies(self, width: int, length: int) -> list[Copy]:
        """Up to `width` candidates of `length` drafts, the most trusted first.

        Longer matches come first, and of equally long ones the latest. Occurrences that were
        followed by the same tokens count once.
        """
        found = []
        for number, (place, matched) in enumerate(self._matches(width, length)):
            scores = [number * math.log(self._lookup.second)]
            for i in range(length):
                scores.append(scores[-1] + math.log(self._rate(matched + i)))
            found.append(Copy(tuple(self._after(place, length)), tuple(scores[1:]), matched))
        return found

    def _matches(self, width: int, length: int) -> list[tuple[int, int]]:
        """Where the best matches end, and how many tokens match; all continue differently."""
        places = self._ends.get(self._last_gram(), ())
        best: list[tuple[int, int]] = []
        for place in reversed(places):
            if place < len(self.tokens) - 1:
                best.append((place, self._matched(place)))
        best.sort(key=lambda match: -match[1])  # stable: the latest of equals stays first
        chosen: dict[tuple[int, ...], tuple[int, int]] = {}
        for match in best:
            chosen.setdefault(tuple(self._after(match[0], length)), match)
            if len(chosen) == width:
                break
        return list(chosen.values())

    def _matched(self, place: int) -> int:
        """How many tokens up to `place` are also the text's last ones, as far as compared."""
        most, end = min(len(self._lookup.accepted), place + 1), len(self.tokens) - 1
        length = self._lookup.shortest
        while length < most and self.tokens[place - length] == self.tokens[end - length]:
            length += 1
        return length

    def _after(self, place: int, count: int) -> list[int]:
        """The `count` tokens after a place, continued past the end of the text.

        A text that ends d places after a match repeats itself every d tokens if the match is
        right, so past its end the same d tokens come again: a loop is drafted to any length.
        """
        period = len(self.tokens) - 1 - place
        return [self.tokens[place + 1 + i % period] for i in range(count)]

    def _rate(self, matched: int) -> float:
        """The chance of the next token after so many that match."""
        i = min(matched, len(self._trials)) - 1
        return self._hits[i] / self._trials[i]

    def _last_gram(self) -> tuple[int, ...]:
        return tuple(self.tokens[-self._lookup.shortest :])

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        if len(self.tokens) >= self._lookup.shortest:
            self._ends.setdefault(self._last_gram(), []).append(len(self.tokens) - 1)


def split_lookup(drafter: _T | str) -> tuple[_T | str | None, bool]:
    """What names the drafter itself, and whether the text is looked up (as well).

    "lookup" is prompt lookup alone, "FOLDER+lookup" a drafter and lookup; anything else is itself.
    """
    if not isinstance(drafter, str):
        return drafter, False
    if drafter == _WORD:
        return None, True
    name = drafter.removesuffix(_SUFFIX)
    if not name:
        raise BadInputError(f"drafter is {drafter!r}; name a drafter before {_SUFFIX}")
    return name, name != drafter
