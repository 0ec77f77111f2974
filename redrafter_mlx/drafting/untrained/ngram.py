"""Prompt lookup: drafts are copied from what followed an earlier n-gram match in the text.

    text so far        the cat sat on the mat . then the cat | sat on the
    its last tokens    the cat
    earlier match      ^^^^^^^ sat on the mat                   -> drafts sat, on, the

Answers that quote (summaries, edits of code, extraction) repeat their question; answers that loop
repeat themselves. The host has read every token of the text before it submits the next
verification, so it keeps an index of n-grams: a match costs microseconds and no work of the device.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from redrafter_mlx.drafting.untrained.continuation import Continuation, Kind

_BESIDE_A_DRAFTER = 3
"""Minimum match length when a drafter drafts too: shorter matches are right less often."""

_LONG_MATCH = 8
"""Number of matching tokens from which a match is long: such hold where short ones fail."""

_PRIOR_TRIALS = 4.0
"""Weight of the rates in `Lookup.accepted`, as a number of matches in the text at hand."""

_MAX_MATCHES = 256
"""Number of latest matches among which candidates are chosen, so that a common n-gram costs no long
search."""

_TOKEN_BITS = 32
"""Bits of a token in an n-gram's key."""


@dataclass(frozen=True)
class Lookup:
    """Minimum length and acceptance rates of n-gram matches.

    shortest: minimum number of matching tokens
    accepted: acceptance rates of the draft after 1, 2, ... matching tokens. The last is for all
              longer matches too, and matches are compared up to that length. An index starts with
              these rates and learns those of its own text
    second:   factor of the acceptance rate from each candidate to the next

    The rates were counted on 34 answers of SmolLM2-135M-Instruct to MT-Bench's questions and to
    questions that ask for quotations; the rate after one token, on short questions.
    """

    shortest: int = 2
    accepted: tuple[float, ...] = (0.20, 0.47, 0.59, 0.71, 0.81, 0.84, 0.84, 0.93)
    second: float = 0.35

    name: ClassVar[str] = "lookup"
    bytes_per_token: ClassVar[int] = 256  # 8 MB for 32,768 tokens
    kept_bytes: ClassVar[int] = 0
    earlier: ClassVar[None] = None

    @classmethod
    def beside(cls, drafter: bool) -> Lookup:
        """Return the default prompt lookup, beside a drafter on the device or alone."""
        return cls(_BESIDE_A_DRAFTER) if drafter else cls()

    def begin(self) -> NgramIndex:
        return NgramIndex(self, ())


class NgramIndex:
    """The text of one sequence, with an index of its n-grams.

    tokens: the text so far
    """

    def __init__(self, lookup: Lookup, tokens: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self._lookup = lookup
        self._key = 0  # of the last shortest n-gram: its tokens, side by side
        self._latest: dict[int, int] = {}  # the latest end of each shortest n-gram
        self._followed: set[int] = set()  # the shortest n-grams without their last token
        self._before = array("i")  # by position: where the shortest n-gram ended before, or -1
        self._best: tuple[int, int] | None = None  # end and length of the best match, once searched
        self._searched = False
        self._hits = [_PRIOR_TRIALS * rate for rate in lookup.accepted]
        self._trials = [_PRIOR_TRIALS] * len(lookup.accepted)
        self.append(tokens)

    def append(self, tokens: Sequence[int]) -> None:
        """Append tokens that were given, not emitted."""
        for token in tokens:
            self._append(token)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append emitted tokens; each also updates the acceptance rate of the match before it."""
        for token in tokens:
            matches = self._matches(1, 1)
            if matches:
                ((position, length),) = matches
                self._trials[length - 1] += 1
                self._hits[length - 1] += self.tokens[position + 1] == token
            self._append(token)

    def next_continuation(self, length: int) -> Continuation | None:
        """Return the continuation of the longest match that the next token can complete, if any.

        Its `length` drafts are not known yet, and 0.
        """
        matched, best = self._lookup.shortest, self._best_match()
        if best is not None:
            matched = min(best[1] + 1, len(self._trials))
        elif len(self.tokens) < matched - 1 or self._last(matched - 1) not in self._followed:
            return None
        return _after_match((0,) * length, self._log_probs(matched, length), matched)

    def continuations(self, width: int, length: int) -> list[Continuation]:
        """Return up to `width` candidates of `length` drafts, the best first.

        Longer matches come first, and among equally long ones the latest. Matches with the same
        continuation give one candidate.
        """
        found = []
        for number, (position, matched) in enumerate(self._matches(width, length)):
            log_probs = self._log_probs(matched, length, number * math.log(self._lookup.second))
            found.append(_after_match(tuple(self._after(position, length)), log_probs, matched))
        return found

    def _log_probs(self, matched: int, length: int, before: float = 0.0) -> tuple[float, ...]:
        """Return the cumulative log-probabilities of the drafts after a match."""
        of_lengths = [math.log(h / n) for h, n in zip(self._hits, self._trials, strict=True)]
        rates = [of_lengths[min(matched + i, len(of_lengths)) - 1] for i in range(length)]
        return tuple(accumulate(rates, initial=before))[1:]

    def _matches(self, width: int, length: int) -> list[tuple[int, int]]:
        """Return end and length of the best matches, all with different continuations."""
        if width == 1:
            single = self._best_match()
            return [] if single is None else [single]
        best = [(position, self._matched(position)) for position in self._earlier()]
        best.sort(key=lambda match: -match[1])  # stable: among equals, the latest stays first
        chosen: dict[tuple[int, ...], tuple[int, int]] = {}
        for match in best:
            chosen.setdefault(tuple(self._after(match[0], length)), match)
            if len(chosen) == width:
                break
        return list(chosen.values())

    def _best_match(self) -> tuple[int, int] | None:
        """Return end and length of the best match: the latest of the longest."""
        if not self._searched:
            self._best, self._searched = None, True
            for position in self._earlier():
                length = self._matched(position)
                if self._best is None or length > self._best[1]:
                    self._best = position, length
                if length == len(self._lookup.accepted):
                    break
        return self._best

    def _earlier(self) -> Iterator[int]:
        """Yield where the last shortest n-gram ended before, the latest end first."""
        position = self._before[-1] if self._before else -1
        for _ in range(_MAX_MATCHES):
            if position < 0:
                return
            yield position
            position = self._before[position]

    def _matched(self, position: int) -> int:
        """Return the length of the match that ends at `position`, up to the compared length."""
        max_length, end = min(len(self._lookup.accepted), position + 1), len(self.tokens) - 1
        length = self._lookup.shortest
        while length < max_length and self.tokens[position - length] == self.tokens[end - length]:
            length += 1
        return length

    def _after(self, position: int, count: int) -> list[int]:
        """Return the `count` tokens after `position`, continued past the end of the text.

        If the text ends d tokens after a match and the match is right, the text repeats itself
        every d tokens. So past its end the same d tokens repeat: a loop is drafted to any length.
        """
        period = len(self.tokens) - 1 - position
        return [self.tokens[position + 1 + i % period] for i in range(count)]

    def _append(self, token: int) -> None:
        shortest = self._lookup.shortest
        before = self._last(shortest - 1)
        self.tokens.append(token)
        self._key = (before << _TOKEN_BITS) | token
        self._searched = False
        earlier, end = -1, len(self.tokens) - 1
        if end + 1 >= shortest:
            self._followed.add(before)
            earlier = self._latest.get(self._key, -1)
            self._latest[self._key] = end
        self._before.append(earlier)

    def _last(self, n: int) -> int:
        """Return the key of the last `n` tokens, at most those of the shortest n-gram."""
        return self._key & ((1 << _TOKEN_BITS * n) - 1)


def _after_match(
    tokens: tuple[int, ...], log_probs: tuple[float, ...], matched: int
) -> Continuation:
    """Return a continuation after a match; one that is not long holds twice its length at most."""
    kind: Kind = "long match" if matched >= _LONG_MATCH else "short match"
    return Continuation(tokens, log_probs, kind, None if kind == "long match" else 2 * matched)
