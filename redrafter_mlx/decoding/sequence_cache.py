"""What is kept of the text: the target's keys and values, and the drafter's memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from redrafter_mlx.drafting.interface import Drafter, Memory, Seen
from redrafter_mlx.target.cache_slots import concatenate_padded
from redrafter_mlx.target.kv_cache import Snapshot, TreeCache

_MOST_JOINED = 512
"""Missed positions that a drafter is given in one call."""

_MOST_MISSED = 512
"""Steps, or positions of one, whose features are kept for a drafter that is parked."""


@dataclass(frozen=True)
class SequenceSnapshot:
    """The references of a `SequenceCache` at one moment."""

    target: Snapshot
    memory: Memory
    remembered: mx.array
    missed: tuple[Seen, ...]


class SequenceCache:
    """The cache of a batch of sequences: of the target, and of its drafter if that remembers.

    Shapes:
      remembered: [B] int32, positions from the first on that `memory` holds

    missed: positions after those, which the drafter is given before it drafts again
    """

    def __init__(self, target: TreeCache, memory: Memory, batch: int) -> None:
        self.target = target
        self.memory = memory
        self.remembered = mx.zeros((batch,), mx.int32)
        self.missed: tuple[Seen, ...] = ()

    def snapshot(self) -> SequenceSnapshot:
        """What a step that is only built, not submitted, would have changed.

        Drop it before submitting: a buffer with two references is copied whole when written.
        """
        return SequenceSnapshot(self.target.snapshot(), self.memory, self.remembered, self.missed)

    def restore(self, before: SequenceSnapshot) -> None:
        """Forget a step that was built and not submitted."""
        self.target.restore(before.target)
        self.memory, self.remembered = before.memory, before.remembered
        self.missed = before.missed

    def flush(self) -> None:
        """Make the cache ready to be kept: all that it holds is computed."""
        self.target.flush()
        mx.eval(self.target.buffers, self.of_drafter)

    @property
    def of_drafter(self) -> list[Memory | mx.array]:
        """All arrays that are kept for the drafter, for evaluation."""
        kept: list[Memory | mx.array] = [self.memory, self.remembered]
        for seen in self.missed[-1:]:  # those before it were evaluated when they were the last
            kept += [seen.tokens, seen.position, seen.count]
            kept += [] if seen.features is None else [seen.features]
        return kept

    def show(self, seen: Seen, drafter: Drafter, parked: bool) -> None:
        """Let the drafter remember committed positions, now or when it drafts again.

        The target's features are large: before many are kept for a parked drafter, it reads them.
        """
        self.missed += (seen,)
        many = max(len(self.missed), seen.tokens.shape[1]) >= _MOST_MISSED
        if not parked or (many and drafter.features.any):
            self.catch_up(drafter)

    def catch_up(self, drafter: Drafter) -> None:
        """Give the drafter what it missed."""
        for seen in joined(self.missed):
            self.memory = drafter.extend(self.memory, seen)
            self.remembered = seen.root_position
        self.missed = ()

    def take(self, rows: Sequence[int]) -> SequenceCache:
        """The cache of some of the batch's rows, which is a copy."""
        index = mx.array(list(rows))
        taken = SequenceCache(self.target.take(index), take_rows(self.memory, index), len(rows))
        taken.remembered = self.remembered[index]
        taken.missed = tuple(seen.take(index) for seen in self.missed)
        return taken

    @classmethod
    def joined(cls, caches: Sequence[SequenceCache]) -> SequenceCache:
        """The rows of several caches as one batch; their drafters have missed nothing."""
        assert not any(cache.missed for cache in caches), "catch up first"
        target = type(caches[0].target).joined([cache.target for cache in caches])
        memory = join_rows([cache.memory for cache in caches])
        remembered = mx.concatenate([cache.remembered for cache in caches])
        whole = cls(target, memory, remembered.size)
        whole.remembered = remembered
        return whole

    def trimmed(self, length: int) -> SequenceCache:
        """The first positions of one text, computed, in target buffers without room to spare."""
        kept = SequenceCache(self.target.trimmed(length), self.memory, 1)
        kept.remembered = mx.minimum(self.remembered, length)
        mx.eval(kept.target.buffers, kept.of_drafter)
        return kept

    def reused(self, tokens: Sequence[int], drafter: Drafter | None) -> SequenceCache:
        """A cache for a text that begins with `tokens`, whose positions are all here.

        It shares this one's arrays. A drafter that reads the target's features must remember them
        already; one that remembers the tokens alone is given those that it missed.
        """
        cache = SequenceCache(self.target.shared(), (), 1)
        if drafter is None or not drafter.features.every_position:
            return cache
        known = min(cast(int, self.remembered.item()), len(tokens))
        cache.memory = self.memory or drafter.empty(1)
        cache.remembered = mx.array([known], mx.int32)  # what came after it is of another text
        if known < len(tokens):
            assert not drafter.features.any, "it must have seen all that is reused"
            cache.missed = (_of_text(tokens, known),)
        return cache

    @property
    def nbytes(self) -> int:
        return self.target.nbytes + sum(a.nbytes for a in _arrays(self.memory))


def take_rows(memory: Memory, index: mx.array) -> Memory:
    """What a drafter remembers of some of the batch's rows."""
    return tuple(a[index] if isinstance(a, mx.array) else take_rows(a, index) for a in memory)


def join_rows(memories: Sequence[Memory]) -> Memory:
    """What it remembers of several batches, as one; zeros fill arrays up to the largest."""

    def join(*each: mx.array | Memory) -> mx.array | Memory:
        arrays = [a for a in each if isinstance(a, mx.array)]
        if len(arrays) == len(each):
            return concatenate_padded(arrays)
        return join_rows([a for a in each if not isinstance(a, mx.array)])

    return tuple(join(*each) for each in zip(*memories, strict=True))


def _arrays(memory: Memory) -> Iterator[mx.array]:
    for a in memory:
        if isinstance(a, mx.array):
            yield a
        else:
            yield from _arrays(a)


def joined(missed: Sequence[Seen]) -> list[Seen]:
    """The same positions in fewer pieces: those of single positions follow each other."""
    pieces: list[Seen] = []
    run: list[Seen] = []
    for seen in missed:
        single = seen.tokens.shape[1] == 2
        if run and (not single or len(run) == _MOST_JOINED):
            pieces.append(_one(run))
            run = []
        if single:
            run.append(seen)
        else:
            pieces.append(seen)
    return pieces + ([_one(run)] if run else [])


def _one(run: Sequence[Seen]) -> Seen:
    """Single positions, each after the one before, as one piece."""
    first, last = run[0], run[-1]
    features = None
    if first.features is not None:
        features = mx.concatenate([s.features for s in run if s.features is not None], axis=1)
    tokens = mx.concatenate([*(s.tokens[:, :1] for s in run), last.tokens[:, 1:]], axis=1)
    count = mx.full(first.count.shape, len(run), mx.int32)
    return Seen(tokens, features, first.position, count, last.bound)


def _of_text(tokens: Sequence[int], start: int) -> Seen:
    """The positions of one text from `start` on, whose features nobody reads."""
    count = len(tokens) - start
    return Seen(
        mx.array([[*tokens[start:], 0]], mx.int32),
        None,
        mx.array([start], mx.int32),
        mx.array([count], mx.int32),
        len(tokens),
        start,
    )
