"""Levels of drafts in a drafter's own cache, for the forms that have one.

The committed positions come first, one slot each. The drafts of a step come after them, level by
level, and the next step overwrites them.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeAlias, cast

import mlx.core as mx

from redrafter_mlx.drafting.interface import Memory, Seen
from redrafter_mlx.drafting.level_drafter import DraftLevels, LevelDrafter
from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.speculation.constants import iota
from redrafter_mlx.speculation.draft_vocabulary import DraftVocabulary
from redrafter_mlx.speculation.tree import TokenTree, pack_beam
from redrafter_mlx.target_model.cache.kv_cache import TreeCache

Held: TypeAlias = "tuple[tuple[mx.array, ...], ...]"
"""Of each layer, keys and values [B, K, T, head size], or recurrent states."""


class CachedDrafter(LevelDrafter):
    """A drafter with a cache of its own.

    Its memory is, for each layer, the keys and values of every committed position, or the recurrent
    states after the last one.
    """

    @abstractmethod
    def new_cache(self) -> TreeCache:
        """Return an empty cache."""

    @abstractmethod
    def append(self, seen: Seen, cache: TreeCache) -> None:
        """Append the committed positions, for which the cache is planned, in one call."""

    def filled_cache(self, memory: Memory) -> TreeCache:
        """Return a cache that holds the memory."""
        cache = self.new_cache()
        if memory:  # the other half of a layer's buffers is of the last tree
            cache.layer_buffers = [(*held, *[None] * len(held)) for held in cast("Held", memory)]
        return cache

    def extend(self, memory: Memory, seen: Seen) -> Memory:
        """Append the committed positions, in one call."""
        cache, tokens = self.filled_cache(memory), seen.tokens[:, 1:]
        if seen.start is None:
            cache.plan_tree(chain(tokens), seen.position, seen.bound)
            self.append(seen, cache)
            commit(seen, cache, tokens.shape[1])
        else:
            cache.plan_prompt(seen.start, tokens.shape[1], seen.bound)
            self.append(seen, cache)
        return memory_of(cache)

    def cut(self, memory: Memory, positions: int) -> Memory:
        """Return the memory of the first positions; the arrays are shared."""
        states = self.new_cache().states
        return tuple(
            held if i in states else tuple(a[:, :, :positions] for a in held)
            for i, held in enumerate(cast("Held", memory))
        )


class CachedLevels(DraftLevels):
    """Levels of which each is one call of the drafter, on its cache.

    Shapes:
      length: [B] int32, slots before the first level, at most `bound`
    """

    def __init__(
        self,
        vocabulary: DraftVocabulary,
        cache: TreeCache,
        seen: Seen,
        length: mx.array,
        bound: int,
    ) -> None:
        super().__init__(vocabulary)
        self._cache, self._seen = cache, seen
        self._length, self._bound = length, bound
        self._depth = 0
        self._mask: mx.array | None = None  # [B, W, nodes so far], of the last level

    @property
    def memory(self) -> Memory:
        """The drafter's memory, including what `first` has read."""
        return memory_of(self._cache)

    def _plan(self, parents: mx.array) -> None:
        """Plan a call that appends nodes to the last level's beams `parents` [B, W]."""
        B, W = parents.shape
        mask = mx.broadcast_to(mx.eye(W, dtype=mx.bool_), (B, W, W))
        if self._mask is not None:
            above = mx.take_along_axis(self._mask, parents[:, :, None], axis=1)
            mask = mx.concatenate([above, mask], axis=2)
        self._mask = mask
        self._cache.plan_level(mask, self._depth, self._length, self._bound)
        self._depth += 1


def chain(tokens: mx.array) -> TokenTree:
    """Return tokens [B, P] as a chain: each is the child of the one before."""
    candidate = tokens[:, None].astype(mx.int32)
    return pack_beam(Beams(candidate, mx.zeros(candidate.shape)), tokens.shape[1])


def commit(seen: Seen, cache: TreeCache, nodes: int) -> None:
    """Commit the positions of `seen`, which begin a chain of `nodes` nodes, in recurrent states."""
    if cache.states:
        path = mx.broadcast_to(iota(nodes), (seen.count.shape[0], nodes))
        cache.commit(chain(path), path, seen.count - 1, seen.position)


def memory_of(cache: TreeCache) -> Memory:
    """Return the contents of the cache."""
    cache.flush()
    held = [buffers[: len(buffers) // 2] for buffers in cache.layer_buffers]
    return cast("Memory", tuple(held))
