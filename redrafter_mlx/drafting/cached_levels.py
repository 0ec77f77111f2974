"""Levels of drafts in a drafter's own KV cache, for the forms that have one.

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
from redrafter_mlx.speculation.draft_vocabulary import DraftVocabulary
from redrafter_mlx.speculation.tree import TokenTree, pack_beam
from redrafter_mlx.target_model.kv_cache import TreeCache

Pairs: TypeAlias = "tuple[tuple[mx.array, mx.array], ...]"
"""Keys and values [B, K, T, head size] of each layer."""


class CachedDrafter(LevelDrafter):
    """A drafter with a KV cache of its own.

    Its memory is the keys and values of every committed position: a pair for each layer.
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
        if memory:
            cache.layer_buffers = [(*pair, None, None) for pair in cast("Pairs", memory)]
        return cache

    def extend(self, memory: Memory, seen: Seen) -> Memory:
        """Append the keys and values of the committed positions, in one call."""
        cache, tokens = self.filled_cache(memory), seen.tokens[:, 1:]
        if seen.start is None:
            cache.plan_tree(chain(tokens), seen.position, seen.bound)
        else:
            cache.plan_prompt(seen.start, tokens.shape[1], seen.bound)
        self.append(seen, cache)
        return memory_of(cache)

    def cut(self, memory: Memory, positions: int) -> Memory:
        """Return the memory of the first positions; the arrays are shared."""
        return tuple(
            (keys[:, :, :positions], values[:, :, :positions])
            for keys, values in cast("Pairs", memory)
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


def memory_of(cache: TreeCache) -> Memory:
    """Return the contents of the cache: a pair of keys and values for each layer."""
    return cast("Memory", tuple((keys, values) for keys, values, *_ in cache.layer_buffers))
