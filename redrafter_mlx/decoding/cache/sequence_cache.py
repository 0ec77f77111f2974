"""The cache of a batch: the target's keys and values, and the drafter's memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import mlx.core as mx

from redrafter_mlx.decoding.cache.checkpoints import Checkpoint, merged
from redrafter_mlx.drafting.interface import Drafter, Memory, Seen
from redrafter_mlx.target_model.cache.kv_cache import Snapshot, TreeCache
from redrafter_mlx.target_model.cache.layer_cache import LayerBuffers
from redrafter_mlx.target_model.cache.plans import MAX_EXCESS
from redrafter_mlx.target_model.cache.slots import concatenate_padded
from redrafter_mlx.target_model.recurrent.state_cache import States

Arrays: TypeAlias = "tuple[Arrays | mx.array | None, ...]"
"""The arrays of a cache, nested as it holds them."""

MAX_JOINED = 512
"""Maximum number of missed positions that a drafter is given in one call."""

MAX_MISSED = 512
"""Number of positions whose features are kept for a drafter that does not draft."""


@dataclass(frozen=True)
class SequenceSnapshot:
    """The arrays that a `SequenceCache` held at one moment."""

    target: Snapshot
    memory: Memory
    remembered: mx.array
    missed: tuple[Seen, ...]


class SequenceCache:
    """The cache of a batch of sequences: the target's, and the drafter's memory if it keeps one.

    Shapes:
      remembered: [B] int32, number of positions, from the first on, that `memory` holds

    missed: the positions after those, which the drafter is given before it drafts again
    checkpoints: of the states of each sequence, in order of their positions
    parted: number of tokens that the sequence's prompt shares with an earlier one; None if no later
            prompt will share some with it
    """

    def __init__(self, target: TreeCache, memory: Memory, batch: int) -> None:
        self.target = target
        self.memory = memory
        self.checkpoints: list[tuple[Checkpoint, ...]] = [()] * batch
        self.parted: int | None = None
        self.remembered = mx.zeros((batch,), mx.int32)
        self.missed: tuple[Seen, ...] = ()

    def snapshot(self) -> SequenceSnapshot:
        """Return what `restore` needs to undo a step that was built but not submitted.

        Drop it before submitting: MLX copies a whole buffer when it is written while it has a
        second reference.
        """
        return SequenceSnapshot(self.target.snapshot(), self.memory, self.remembered, self.missed)

    def restore(self, before: SequenceSnapshot) -> None:
        """Undo a step that was built but not submitted."""
        self.target.restore(before.target)
        self.memory, self.remembered = before.memory, before.remembered
        self.missed = before.missed

    @property
    def of_drafter(self) -> list[Memory | mx.array]:
        """All unevaluated arrays that are kept for the drafter."""
        kept: list[Memory | mx.array] = [self.memory, self.remembered]
        for seen in self.missed[-1:]:  # earlier ones were evaluated when they were the last
            kept += [seen.tokens, seen.position, seen.count]
            kept += [] if seen.features is None else [seen.features]
        return kept

    def show(self, seen: Seen, drafter: Drafter, drafts: bool) -> None:
        """Give the drafter committed positions: now if it drafts, or else before it does again.

        The target's features are large, so it reads them before too many are kept.
        """
        self.missed += (seen,)
        features = [seen.features for seen in self.missed if seen.features is not None]
        if drafts or sum(each.shape[1] for each in features) >= MAX_MISSED:
            self.catch_up(drafter)

    def catch_up(self, drafter: Drafter) -> None:
        """Give the drafter the positions that it missed."""
        for seen in joined(self.missed):
            self.memory = drafter.extend(self.memory, seen)
            self.remembered = seen.root_position
        self.missed = ()

    def take(
        self, rows: Sequence[int], slots: int | None = None, drafter: Drafter | None = None
    ) -> SequenceCache:
        """Return a copy of the cache with some of the batch's rows, of their first slots or all."""
        index, memory = mx.array(list(rows)), self.memory
        if drafter is not None and slots is not None:
            memory = drafter.cut(memory, slots)
        taken = SequenceCache(self.target.take(index, slots), take_rows(memory, index), len(rows))
        taken.remembered = self.remembered[index]
        taken.checkpoints = [self.checkpoints[b] for b in rows]
        taken.missed = tuple(seen.take(index) for seen in self.missed)
        return taken

    @classmethod
    def joined(cls, caches: Sequence[SequenceCache]) -> SequenceCache:
        """Join the rows of several caches into one batch; their drafters must have caught up."""
        assert not any(cache.missed for cache in caches), "catch up first"
        target = type(caches[0].target).joined([cache.target for cache in caches])
        memory = join_rows([cache.memory for cache in caches])
        remembered = mx.concatenate([cache.remembered for cache in caches])
        whole = cls(target, memory, remembered.size)
        whole.remembered = remembered
        whole.checkpoints = [each for cache in caches for each in cache.checkpoints]
        return whole

    def keep_states(self, position: int) -> None:
        """Keep the states of one sequence, of which `position` tokens are read."""
        if self.target.forgetful and self.target.has_checkpoints and len(self.checkpoints) == 1:
            new = Checkpoint(position, self.target.current_states())
            self.checkpoints = [merged([*self.checkpoints[0], new])]

    def reusable(self, length: int, known: int) -> int:
        """Return how many of a text's first `known` tokens can be reused, of `length` in all."""
        if self.target.reaches_back(length, known):
            return known
        at = [each.position for each in self.checkpoints[0] if each.position <= known]
        return max(at, default=0)

    def trim(self, length: int) -> None:
        """Keep only the first positions of one text, computed, in target buffers of just that size.

        No more than one layer is in memory twice, if nothing else refers to the buffers. The
        drafter's memory must have been cut before.
        """
        self.target.trim(length)
        self.checkpoints = [tuple(e for e in self.checkpoints[0] if e.position < length)]
        self.keep_states(length)
        self.memory = _compact(self.memory)
        self.remembered = mx.minimum(self.remembered, length)
        self.missed = ()
        mx.eval(self.of_drafter, [each.states for each in self.checkpoints[0]])

    def trimmed_size(self, length: int) -> tuple[int, int]:
        """Return the bytes and the number of the buffers that `trim` leaves; computes nothing."""
        nbytes, count = self.target.trimmed_size(length)
        memory = list(_arrays(self.memory))
        kept = [each for each in self.checkpoints[0] if each.position < length]
        count += len(memory) + sum(each.buffers for each in kept)
        nbytes += sum(a.nbytes for a in memory) + sum(each.nbytes for each in kept)
        return nbytes, count

    def cut_memory(self, length: int, drafter: Drafter) -> None:
        """Cut the drafter's memory to the first positions of one text; if it cannot, empty it."""
        if drafter.can_cut or cast(int, self.remembered.item()) <= length:
            self.memory = drafter.cut(self.memory, length)
        else:
            self.memory, self.remembered = drafter.empty(1), mx.array([0], mx.int32)

    def reused(self, tokens: Sequence[int], drafter: Drafter | None, length: int) -> SequenceCache:
        """Return a cache for a text that begins with `tokens`, of `length` that this cache holds.

        It shares this cache's arrays. A drafter that reads the target's features must already
        remember these positions; one that remembers only tokens is given those that it missed. A
        memory that does not cover every position belongs to the other text, and begins empty.
        """
        memory = () if drafter is None else drafter.empty(1)
        kept = tuple(each for each in self.checkpoints[0] if each.position <= len(tokens))
        states = kept[-1].states if kept and kept[-1].position == len(tokens) else None
        target = self.target.shared(len(tokens), states, length - len(tokens))
        cache = SequenceCache(target, memory, 1)
        cache.checkpoints = [kept]
        if drafter is None or not drafter.features.every_position:
            return cache
        known = min(cast(int, self.remembered.item()), len(tokens))
        if known:  # else this cache may have been made without the drafter
            cache.memory, cache.remembered = self.memory, self.remembered
            cache.cut_memory(known, drafter)
            known = min(cast(int, cache.remembered.item()), known)
        cache.remembered = mx.array([known], mx.int32)  # later positions belong to another text
        if known < len(tokens):
            assert not drafter.features.any, "it must have seen all that is reused"
            ends = [*range(known + MAX_JOINED, len(tokens), MAX_JOINED), len(tokens)]
            starts = [known, *ends]
            cache.missed = tuple(
                _of_text(tokens, *piece) for piece in zip(starts, ends, strict=False)
            )
        return cache

    @property
    def arrays(self) -> Arrays:
        """All arrays of a cache that was trimmed, nested; `holding` is the inverse."""
        kept = tuple((mx.array(each.position), each.states) for each in self.checkpoints[0])
        return (cast("Arrays", tuple(self.target.layer_buffers)), self.memory, kept)

    def holding(self, arrays: Arrays, remembered: int) -> SequenceCache:
        """Return this new cache with the arrays of another one of its form."""
        layers, memory, kept = cast("tuple[Arrays, Arrays, tuple[Arrays, ...]]", arrays)
        self.target.layer_buffers = cast("tuple[LayerBuffers, ...]", layers)
        self.memory = cast("Memory", memory)
        self.remembered = mx.array([remembered], mx.int32)
        self.target.excess = MAX_EXCESS
        found = cast("tuple[tuple[mx.array, States], ...]", kept)
        self.checkpoints = [tuple(Checkpoint(cast(int, at.item()), s) for at, s in found)]
        return self

    @property
    def nbytes(self) -> int:
        return self.target.nbytes + sum(a.nbytes for a in _arrays(self.memory))


def take_rows(memory: Memory, index: mx.array) -> Memory:
    """Return a drafter's memory of some of the batch's rows."""
    return tuple(a[index] if isinstance(a, mx.array) else take_rows(a, index) for a in memory)


def join_rows(memories: Sequence[Memory]) -> Memory:
    """Join a drafter's memories of several batches; zeros pad arrays to the largest size."""

    def join(*each: mx.array | Memory) -> mx.array | Memory:
        arrays = [a for a in each if isinstance(a, mx.array)]
        if len(arrays) == len(each):
            return concatenate_padded(arrays)
        return join_rows([a for a in each if not isinstance(a, mx.array)])

    return tuple(join(*each) for each in zip(*memories, strict=True))


def _compact(memory: Memory) -> Memory:
    """Return a drafter's memory in buffers of its own size."""
    return tuple(mx.contiguous(a) if isinstance(a, mx.array) else _compact(a) for a in memory)


def _arrays(memory: Memory) -> Iterator[mx.array]:
    for a in memory:
        if isinstance(a, mx.array):
            yield a
        else:
            yield from _arrays(a)


def joined(missed: Sequence[Seen]) -> list[Seen]:
    """Return the same positions in fewer pieces: consecutive single positions are merged."""
    pieces: list[Seen] = []
    run: list[Seen] = []
    for seen in missed:
        single = seen.tokens.shape[1] == 2
        if run and (not single or len(run) == MAX_JOINED):
            pieces.append(_merged(run))
            run = []
        if single:
            run.append(seen)
        else:
            pieces.append(seen)
    return pieces + ([_merged(run)] if run else [])


def _merged(run: Sequence[Seen]) -> Seen:
    """Merge consecutive single positions into one piece."""
    first, last = run[0], run[-1]
    features = None
    if first.features is not None:
        features = mx.concatenate([s.features for s in run if s.features is not None], axis=1)
    tokens = mx.concatenate([*(s.tokens[:, :1] for s in run), last.tokens[:, 1:]], axis=1)
    count = mx.full(first.count.shape, len(run), mx.int32)
    return Seen(tokens, features, first.position, count, last.bound)


def _of_text(tokens: Sequence[int], start: int, end: int) -> Seen:
    """Return the positions `start` to `end` of one text, without features."""
    after = tokens[end] if end < len(tokens) else 0
    return Seen(
        mx.array([[*tokens[start:end], after]], mx.int32),
        None,
        mx.array([start], mx.int32),
        mx.array([end - start], mx.int32),
        len(tokens),
        start,
    )
