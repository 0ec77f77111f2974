"""Caches of earlier texts: a prompt that shares a prefix with one need not read it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from redrafter_mlx.decoding.cache.checkpoints import CHANGED_END, merged
from redrafter_mlx.decoding.cache.sequence_cache import SequenceCache
from redrafter_mlx.drafting.interface import Drafter

Tokens = NDArray[np.int64]

MAX_BUFFERS = 100_000
"""Maximum number of buffers of all texts. Metal's allocator refuses more than about 499,000."""


@dataclass(eq=False)
class Kept:
    """A text and the cache of its positions, whose arrays are shared and never written.

    remembered: number of positions that the drafter's memory holds, or can be given again
    prompt:     number of the text's first tokens that were its prompt, the others its answer
    nbytes:     of the cache, checkpoints included
    buffers:    number of the cache's arrays
    """

    tokens: Tokens
    cache: SequenceCache
    remembered: int
    prompt: int
    nbytes: int
    buffers: int

    def inherit(self, other: Kept) -> None:
        """Take over the checkpoints of a text that begins with this one, or this one with it."""
        mine = self.cache.checkpoints[0]
        n, both = len(self.tokens), merged([*mine, *other.cache.checkpoints[0]])
        both = tuple(each for each in both if each.position <= n)
        self.nbytes += sum(c.nbytes for c in both) - sum(c.nbytes for c in mine)
        self.buffers += sum(c.buffers for c in both) - sum(c.buffers for c in mine)
        self.cache.checkpoints = [both]
        mx.async_eval([each.states for each in both])

    def covers(self, other: Kept, shared: int) -> bool:
        """Whether this text makes the other one redundant; `shared`: length of their prefix."""
        return shared == len(other.tokens) and self._remembers(other, shared)

    def rewrites(self, other: Kept, shared: int) -> bool:
        """Whether this text is a later turn, whose prompt has another form of the other's answer.

        Chat templates drop the reasoning from earlier answers. Some also change the last tokens of
        the other's prompt, which opened the reasoning.
        """
        changed = other.prompt - shared
        same_turn = changed <= min(CHANGED_END, other.prompt // CHANGED_END)
        return same_turn and shared < self.prompt and self._remembers(other, shared)

    def _remembers(self, other: Kept, shared: int) -> bool:
        return self.remembered >= min(other.remembered, shared)


class PrefixCache:
    """Caches of texts, the least recently used first, limited in bytes and in number of buffers.

    The target's and the drafter's state are kept together. A cache that is handed out shares the
    entry's arrays until it is written to: MLX copies a buffer that has another reference.

    nbytes: of all texts
    added:  number of texts that were ever kept
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.entries: list[Kept] = []
        self.nbytes, self.n_buffers, self.added = 0, 0, 0

    def take(
        self, prompt: Sequence[int], drafter: Drafter | None
    ) -> tuple[SequenceCache, int] | None:
        """Return a cache for `prompt` and the length of the prefix that it already holds.

        The last token is always read: the first choice needs its hidden state. None if no text
        shares a prefix with the prompt.
        """
        best, longest = self._best(prompt, drafter)
        if best is None:
            return None
        return best.cache.reused(prompt[:longest], drafter, len(best.tokens)), longest

    def longest_shared(self, prompt: Sequence[int]) -> int:
        """Return the length of the longest prefix that a text shares with the prompt."""
        return max((common_prefix(entry.tokens, prompt) for entry in self.entries), default=0)

    def touch(self, prompt: Sequence[int], drafter: Drafter | None) -> None:
        """Drop the text that `take` would use only after all others."""
        self._best(prompt, drafter)

    def keep(
        self,
        cache: SequenceCache,
        tokens: Sequence[int],
        drafter: Drafter | None,
        prompt: int | None = None,
    ) -> Kept | None:
        """Keep a cache whose first positions are those of `tokens`; the caller gives it up.

        It is trimmed in place, so that it is not in memory twice. A text that is larger than the
        limit, or that a kept one holds, is not kept: then nothing is computed or dropped, and None
        is returned.

        prompt: number of the first tokens that were the prompt; None if there is no answer
        """
        text = np.array(tokens, np.int64)
        n = remembered = len(text)
        if drafter is not None:
            cache.cut_memory(n, drafter)
        if drafter is None or _reads_features(drafter):
            remembered = min(cast(int, cache.remembered.item()), n)
        prompt = n if prompt is None else min(prompt, n)
        if cache.target.forgetful:
            cache.target.flush()
            cache.keep_states(n)  # for a text that holds this one, too
        new = Kept(text, cache, remembered, prompt, *cache.trimmed_size(n))
        if not self._make_room(new):
            return None
        cache.trim(n)
        self._add(new)
        return new

    def restore(self, cache: SequenceCache, tokens: Tokens, remembered: int, prompt: int) -> None:
        """Keep a cache that an earlier process kept; the fields as in `Kept`."""
        new = Kept(tokens, cache, remembered, prompt, *cache.trimmed_size(len(tokens)))
        if self._make_room(new):
            self._add(new)

    def known(self, prompt: Sequence[int], drafter: Drafter | None) -> int:
        """Return the length of the prefix that a text shares with the prompt; as `touch`."""
        return self._best(prompt, drafter)[1]

    def shrink(self, max_bytes: int, max_buffers: int = MAX_BUFFERS) -> None:
        """Drop the least recently used texts until the others take at most `max_bytes`."""
        while self.entries and (self.nbytes > max_bytes or self.n_buffers > max_buffers):
            self._drop(self.entries[0])

    def _best(self, prompt: Sequence[int], drafter: Drafter | None) -> tuple[Kept | None, int]:
        """Return the text that holds most of the prompt, and how much; it counts as used now."""
        wanted = np.array(prompt, np.int64)
        best, longest = None, 0
        for entry in self.entries:
            common = common_prefix(entry.tokens, wanted)
            known = min(common, len(wanted) - 1)
            if drafter is not None and _reads_features(drafter):
                # It remembers each position together with the token after it.
                known = min(common - 1, len(wanted) - 1, entry.remembered)
                known = known if drafter.can_cut or known == entry.remembered else 0
            known = entry.cache.reusable(len(entry.tokens), known)
            if known > 0 and known >= longest:
                best, longest = entry, known
        if best is not None:
            self.entries.remove(best)
            self.entries.append(best)
        return best, longest

    def _make_room(self, new: Kept) -> bool:
        """Drop what a new text makes redundant, and what is too much; False if it is not kept."""
        shared = {other: common_prefix(other.tokens, new.tokens) for other in self.entries}
        covered = False
        for other, n in shared.items():
            if other.covers(new, n):
                self._count(other, -1)
                other.inherit(new)
                self._count(other)
                covered = True
            elif new.covers(other, n):
                new.inherit(other)
        if covered or new.nbytes > self._max_bytes:
            return False
        longest = max(shared.values(), default=0)
        for other, n in shared.items():
            if new.covers(other, n) or (n == longest and new.rewrites(other, n)):
                self._drop(other)
        self.shrink(self._max_bytes - new.nbytes, MAX_BUFFERS - new.buffers)
        return True

    def _add(self, new: Kept) -> None:
        self.entries.append(new)
        self.added += 1
        self._count(new)

    def _drop(self, entry: Kept) -> None:
        self.entries.remove(entry)
        self._count(entry, -1)

    def _count(self, entry: Kept, times: int = 1) -> None:
        self.nbytes += times * entry.nbytes
        self.n_buffers += times * entry.buffers


def common_prefix(a: Sequence[int] | Tokens, b: Sequence[int] | Tokens) -> int:
    """Return the length of the common prefix."""
    n = min(len(a), len(b))
    differ = np.asarray(a[:n]) != np.asarray(b[:n])
    return int(differ.argmax()) if differ.any() else n


def _reads_features(drafter: Drafter) -> bool:
    """Whether the drafter's memory can only be made while the target reads the text."""
    return drafter.features.every_position and drafter.features.any
