"""What is kept of texts that were read: a prompt that begins like one of them is not read anew."""

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

    remembered: positions that the drafter's memory holds
    """

    tokens: Tokens
    cache: SequenceCache
    remembered: int

    def covers(self, other: _Entry) -> bool:
        """Whether nothing is lost without the other one."""
        n = len(other.tokens)
        shared = common_prefix(self.tokens, other.tokens)
        return shared == n and self.remembered >= min(other.remembered, n)


class PrefixCache:
    """Caches of texts, the least recently used first, bounded in bytes.

    Target's and drafter's state are kept together. What is handed out shares the entry's arrays
    until it is written to: MLX copies a buffer to which there is another reference.
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
        """A cache for `prompt` and how many of its first tokens need not be read again.

        The last token is always read: the first choice follows from its hidden state. None where
        no text begins like the prompt.
        """
        wanted = np.array(prompt[:-1], np.int64)
        reads = drafter is not None and drafter.features.every_position and drafter.features.any
        best, most = None, 0
        for entry in self._entries:
            common = common_prefix(entry.tokens, wanted)
            known = min(common, entry.remembered) if reads else common
            if known and known >= most:
                best, most = entry, known
        if best is None:
            return None
        self._entries.remove(best)
        self._entries.append(best)
        return best.cache.reused(prompt[:most], drafter), most

    def keep(self, cache: SequenceCache, tokens: Sequence[int]) -> None:
        """Keep a cache, flushed, whose first positions are those of `tokens`."""
        text = np.array(tokens, np.int64)
        remembered = min(cast(int, cache.remembered.item()), len(text))
        entry = _Entry(text, cache.trimmed(len(text)), remembered)
        if any(other.covers(entry) for other in self._entries):
            return
        self._entries = [other for other in self._entries if not entry.covers(other)]
        self._entries.append(entry)
        self.shrink(self._most_bytes)

    def shrink(self, most_bytes: int) -> None:
        """Let go of texts until the rest takes so many bytes at most."""
        while self._entries and self.nbytes > most_bytes:
            self._entries.pop(0)


def common_prefix(a: Sequence[int] | Tokens, b: Sequence[int] | Tokens) -> int:
    """How many first elements are the same in both."""
    n = min(len(a), len(b))
    differ = np.asarray(a[:n]) != np.asarray(b[:n])
    return int(differ.argmax()) if differ.any() else n
