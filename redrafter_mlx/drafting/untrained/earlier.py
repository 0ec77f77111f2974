"""Earlier texts: drafts are copied from what followed the same tokens in other requests' texts.

Agents and users ask for much the same again: a question once more, the next edit of a file, one
more report of a kind. The longest match is continued, as in SuffixDecoding (arXiv 2411.04975); of
equally long ones, first as most texts go on.

    earlier   Q: capital of France? A: Paris is the capital of France.
    now       Q: capital of France? A:        -> drafts Paris, is, the, ...
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, deque
from collections.abc import Sequence
from itertools import accumulate
from typing import ClassVar, NamedTuple

from redrafter_mlx.drafting.untrained.continuation import Continuation, EarlierState

_KEY, _SHORTEST, _LONG, _COMPARED = 3, 4, 8, 32
"""Number of tokens by which a text is indexed, of the shortest match, of a long one, which needs no
limit of its drafts, and the maximum number that is compared."""

_RATES = {4: 0.5, 5: 0.6, 6: 0.65, 7: 0.7, 8: 0.8, 16: 0.92, 32: 0.96}
"""Assumed acceptance rate of the next token after matches of so many tokens or more."""

_PRIOR_TRIALS, _SECOND = 4.0, 0.3
"""Weight of these rates as a number of matches, and factor from each candidate to the next."""

_MAX_TEXTS, _MAX_ENDS = 128, 16
"""Maximum number of texts that are kept, and of matches that are compared in each."""


class _Match(NamedTuple):
    """Where the current text's last `length` tokens ended in another text."""

    length: int
    text: _Text
    end: int

    def after(self, count: int) -> tuple[int, ...]:
        return tuple(self.text.tokens[self.end + 1 : self.end + 1 + count])


class _Text:
    """A text with an index of its n-grams.

    latest: the latest end of each n-gram
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = array("i")
        self.latest: dict[tuple[int, ...], int] = {}
        self._before = array("i")  # by position: where its n-gram ended before, or -1
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        key, end = tuple(self.tokens[-_KEY:]), len(self.tokens) - 1
        self._before.append(self.latest.get(key, -1))
        self.latest[key] = end

    def ends(self, key: tuple[int, ...]) -> list[int]:
        """Return where a known n-gram ends that is followed by a token, the latest first."""
        end = self.latest[key]
        if end == len(self.tokens) - 1:
            end = self._before[end]
        ends = list[int]()
        while end >= 0 and len(ends) < _MAX_ENDS:
            ends.append(end)
            end = self._before[end]
        return ends


class EarlierTexts:
    """The latest texts of this process, prompts and answers, at most `max_tokens` of them.

    A text is known to others as soon as it is read. Only the engine's thread may use its sources.
    """

    name: ClassVar[str] = "earlier"
    bytes_per_token: ClassVar[int] = 256

    def __init__(self, max_tokens: int = 1 << 16) -> None:
        self.max_tokens = max_tokens
        self.texts: deque[_Text] = deque()
        self.trials = {length: [_PRIOR_TRIALS * p, _PRIOR_TRIALS] for length, p in _RATES.items()}

    @property
    def kept_bytes(self) -> int:
        """Maximum host memory of the texts that have ended."""
        return self.max_tokens * self.bytes_per_token

    @property
    def earlier(self) -> EarlierTexts:
        return self

    def begin(self) -> EarlierSource:
        return EarlierSource(self)

    def state(self) -> EarlierState:
        """Return a copy of the texts; only the engine's thread may call it."""
        trials = [(hits, trials) for hits, trials in self.trials.values()]
        return EarlierState([text.tokens[:] for text in self.texts], trials)

    def restore(self, state: EarlierState) -> None:
        """Put texts before those that are here; the record of matches is that of `state`."""
        earlier = [_Text(tokens) for tokens in state.texts]
        self.texts.extendleft(reversed(earlier))
        if len(state.trials) == len(self.trials):
            self.trials = {n: [*t] for n, t in zip(self.trials, state.trials, strict=True)}
        self.trim()

    def trim(self) -> None:
        """Drop the oldest texts, as far as there are too many."""
        while len(self.texts) > _MAX_TEXTS or (
            len(self.texts) > 1 and sum([len(t.tokens) for t in self.texts]) > self.max_tokens
        ):
            self.texts.popleft()

    def counts(self, length: int) -> list[float]:
        """Return hits and trials of matches of this length."""
        return self.trials[max([known for known in self.trials if known <= length])]


class EarlierSource:
    """Finds continuations of one text in the others."""

    def __init__(self, store: EarlierTexts) -> None:
        self._store, self._text = store, _Text()
        self._found: list[_Match] | None = None  # once searched

    def append(self, tokens: Sequence[int]) -> None:
        if tokens and not self._text.tokens:
            self._store.texts.append(self._text)
        for token in tokens:
            self._text.append(token)
        self._found = None
        self._store.trim()

    def extend(self, tokens: Sequence[int]) -> None:
        """Append emitted tokens; each also updates the acceptance rate of the match before it."""
        for token in tokens:
            for best in self._matches()[:1]:
                counts = self._store.counts(best.length)
                counts[0] += best.after(1) == (token,)
                counts[1] += 1
            self._text.append(token)
            self._found = None
        self._store.trim()

    def continuations(self, width: int, length: int) -> list[Continuation]:
        """Return up to `width` candidates of up to `length` drafts, the best first."""
        found: dict[tuple[int, ...], Continuation] = {}
        for match in self._matches():
            if len(found) == width:
                break
            if (tokens := match.after(length)) not in found:
                log_probs = self._log_probs(match.length, len(tokens), len(found))
                found[tokens] = _continuation(tokens, log_probs, match.length)
        return list(found.values())

    def next_continuation(self, length: int) -> Continuation | None:
        matches = self._matches()
        if not self._others(tuple(self._text.tokens[-_KEY:])):
            return None
        matched = max([_SHORTEST, *[match.length + 1 for match in matches[:1]]])
        return _continuation((0,) * length, self._log_probs(matched, length), matched)

    def _others(self, key: tuple[int, ...]) -> list[_Text]:
        """Return the other texts that have an n-gram, the oldest first."""
        texts = self._store.texts
        return [text for text in texts if key in text.latest and text is not self._text]

    def _matches(self) -> list[_Match]:
        """Return the matches, the longest first; then those that go on as most of these do."""
        if self._found is None:
            key, found = tuple(self._text.tokens[-_KEY:]), list[_Match]()
            for text in reversed(self._others(key)):
                for end in text.ends(key):
                    length = self._matched(text, end)
                    if length >= _SHORTEST:
                        found.append(_Match(length, text, end))
            votes = Counter((match.length, match.after(1)) for match in found)
            found.sort(key=lambda one: (-one.length, -votes[one.length, one.after(1)]))
            self._found = found
        return self._found

    def _matched(self, text: _Text, end: int) -> int:
        """Return how many tokens before and at `end` are the last ones of the current text."""
        mine, other, length = self._text.tokens, text.tokens, _KEY
        max_length = min(_COMPARED, len(mine), end + 1)
        while length < max_length and mine[-1 - length] == other[end - length]:
            length += 1
        return length

    def _log_probs(self, matched: int, length: int, number: int = 0) -> tuple[float, ...]:
        counts = [self._store.counts(matched + i) for i in range(length)]
        rates = [math.log(hits / trials) for hits, trials in counts]
        return tuple(accumulate(rates, initial=number * math.log(_SECOND)))[1:]


def _continuation(
    tokens: tuple[int, ...], log_probs: tuple[float, ...], matched: int
) -> Continuation:
    return Continuation(tokens, log_probs, "earlier", None if matched >= _LONG else 2 * matched)
