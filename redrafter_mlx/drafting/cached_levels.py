"""Levels of drafts in a drafter's own KV cache, for the forms that have one.

The committed positions come first, one slot each. The drafts of a step come after them, level by
level, and the next step overwrites them.
"""

from __future__ import annotations

from typing import TypeAlias, cast

import mlx.core as mx

from redrafter_mlx.drafting.interface import Memory, Seen
from redrafter_mlx.drafting.level_drafter import DraftLevels
from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.speculation.draft_vocabulary import DraftVocabulary
from redrafter_mlx.speculation.tree import TokenTree, pack_beam
from redrafter_mlx.target.kv_cache import TreeCache

Pairs: TypeAlias = "tuple[tuple[mx.array, mx.array], ...]"
"""Keys and values [B, K, T, head size] of each layer."""


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


def fill_cache(cache: TreeCache, memory: Memory) -> TreeCache:
    """Fill an empty cache with what `memory_of` returned for such a cache."""
    if memory:
        cache.layer_buffers = [(*pair, None, None) for pair in cast("Pairs", memory)]
    return cache


def cut_memory(memory: Memory, positions: int) -> Memory:
    """Return the first positions of what `memory_of` returned; the arrays are shared."""
    return tuple(
        (keys[:, :, :positions], values[:, :, :positions]) for keys, values in cast("Pairs", memory)
    )


def memory_of(cache: TreeCache) -> Memory:
    """Return the contents of the cache: a pair of keys and values for each layer."""
    return cast("Memory", tuple((keys, values) for keys, values, *_ in cache.layer_buffers))
