"""mlx-lm's own caches in 8 or 4 bits, for its own model and loop: the reference for ours."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, make_prompt_cache

from redrafter_mlx.target_model.cache.packed_cache import Packing


class RoundedKVCache(KVCache):  # type: ignore[misc]
    """mlx-lm's cache of numbers that were quantised, for attention that takes no quantised ones."""

    def __init__(self, packing: Packing) -> None:
        super().__init__()
        self._packing = packing

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append rounded keys and values; return all."""
        packing = self._packing
        early = self.offset + mx.arange(keys.shape[2])[:, None] < packing.start
        both = (keys, values)
        rounded = [mx.where(early, a, packing.unpack(packing.pack(a))) for a in both]
        found: tuple[mx.array, mx.array] = super().update_and_fetch(*rounded)
        return found


class _ShakenCache:
    """A cache whose numbers are moved at random, by as much as they are rounded, on their way in.

    Where a number lies between two steps of the quantisation, rounding chooses the step.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def update_and_fetch(self, *given: mx.array) -> tuple[mx.array, mx.array]:
        moved = []
        for a in given:
            by = mx.finfo(a.dtype).eps * mx.random.uniform(-1, 1, a.shape, a.dtype)
            moved.append(a * (1 + by))
        found: tuple[mx.array, mx.array] = self._cache.update_and_fetch(*moved)
        return found

    def __getattr__(self, name: str) -> object:
        return getattr(self._cache, name)


def plain_caches(model: nn.Module, packing: Packing | None, *, shaken: bool = False) -> list[Any]:
    """Return mlx-lm's caches for its own model and loop, quantised as ours are.

    shaken: whether numbers are moved by rounding before they are quantised
    """

    def quantised(cache: Any) -> object:
        if type(cache) is CacheList:
            return CacheList(*map(quantised, cache.caches))
        if packing is None or type(cache) is not KVCache:
            return cache
        taken = packing.taken
        made = QuantizedKVCache(packing.group, packing.bits) if taken else RoundedKVCache(packing)
        return _ShakenCache(made) if shaken else made

    return [*map(quantised, make_prompt_cache(model))]


def are_quantised(caches: Iterable[object]) -> bool:
    """Whether some of mlx-lm's caches are quantised, as `plain_caches` returns them."""
    kinds = QuantizedKVCache, RoundedKVCache, _ShakenCache
    return any(isinstance(cache, kinds) for cache in caches)


def positions_of(caches: Iterable[object]) -> int:
    """Return the number of tokens that mlx-lm's caches hold; 0 where they hold states alone."""
    counts = [int(cache.offset) for cache in caches if hasattr(cache, "offset")]
    return counts[0] if counts else 0


def compute_with(cache: Any, result: mx.array) -> None:
    """Make what one of mlx-lm's caches holds depend on a result, which is computed with it."""
    if not hasattr(cache, "keys"):
        cache.state = [None if a is None else mx.depends(a, result) for a in cache.state]
    elif isinstance(cache.keys, tuple):  # quantised
        cache.keys = (mx.depends(cache.keys[0], result), *cache.keys[1:])
    else:
        cache.keys = mx.depends(cache.keys, result)
