"""Caches of earlier texts: a prompt that shares a prefix with one need not read it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from redrafter_mlx.decoding.sequence_cache import SequenceCache
from redrafter_mlx.drafting.interface import Drafter

Tokens = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class _Entry:
    """A text and the cache of its positions, whose arrays are shared and never written.

    remembered: number of positions that the drafter's memory holds, or can be given again
    """

    tokens: Tokens
    cache: SequenceCache
    remembered: int

    def covers(self, other: _Entry) -> bool:
        """Whether this entry makes the other one redundant."""
        n = len(other.tokens)
        shared = common_prefix(self.tokens, other.tokens)
        return shared == n and self.remembered >= min(other.remembered, n)


class PrefixCache:
    """Caches of texts, the least recently used first, limited in bytes.

    The target's and the drafter's state are kept together. A cache that is handed out shares the
    entry's arrays until it is written to: MLX copies a buffer that has another reference.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._entries: list[_Entry] = []

    @property
    def nbytes(self) -> int:
        return sum(entry.cache.nbytes for entry in self._entries)

    def take(
        self, prompt: Sequence[int], drafter: Drafter | None
    ) -> tuple[SequenceCache, int] | None:
        """Return a cache for `prompt` and the length of the prefix that it already holds.

        The last token is always read: the first choice needs its hidden state. None if no text
        shares a prefix with the prompt.
        """
        wanted = np.array(prompt, np.int64)
        best, most = None, 0
        for entry in self._entries:
            common = common_prefix(entry.tokens, wanted)
            known = min(common, len(wanted) - 1)
            if drafter is not None and _reads_features(drafter):
                # It remembers each position together with the token after it.
                known = min(common - 1, len(wanted) - 1, entry.remembered)
            if known > 0 and known >= most:
                best, most = entry, known
        if best is None:
            return None
        self._entries.remove(best)
        self._entries.append(best)
        return best.cache.reused(prompt[:most], drafter), most

    def keep(self, cache: SequenceCache, tokens: Sequence[int], drafter: Drafter | None) -> None:
        """Keep a flushed cache whose first positions are those of `tokens`."""
        text = np.array(tokens, np.int64)
        remembered = len(text)
        if drafter is None or _reads_features(drafter):
            remembered = min(cast(int, cache.remembered.item()), len(text))
        entry = _Entry(text, cache.trimmed(len(text)), remembered)
        if any(other.covers(entry) for other in self._entries):
            return
        self._entries = [other for other in self._entries if not entry.covers(other)]
        self._entries.append(entry)
        self.shrink(self._most_bytes)

    def shrink(self, most_bytes: int) -> None:
        """Drop the least recently used texts until the others take at most `most_bytes`."""
        while self._entries and self.nbytes > most_bytes:
            self._entries.pop(0)


def common_prefix(a: Sequence[int] | Tokens, b: Sequence[int] | Tokens) -> int:
    """Return the length of the common prefix."""
    n = min(len(a), len(b))
    differ = np.asarray(a[:n]) != np.asarray(b[:n])
    return int(differ.argmax()) if differ.any() else n


def _reads_features(drafter: Drafter) -> bool:
    """Whether the drafter's memory can only be made while the target reads the text."""
    return drafter.features.every_position and drafter.features.any
