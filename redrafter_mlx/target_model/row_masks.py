"""Masks for batch rows of different length, in the form that a model's attention takes.

Fused attention takes masks [B, 1, N, T]. Attention without a fused kernel, such as Gemma 2's,
groups the query heads by key head, and adds its mask to scores [B, K, H / K, N, T].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from redrafter_mlx.target_model.cache.kv_cache import TreeCache
from redrafter_mlx.target_model.cache.plans import SlotPlan, TreePlan
from redrafter_mlx.target_model.recurrent.interface import TreeNodes

_ROWS = 1009
"""Larger than the other axes of a model, and a prime: a mask of the wrong form does not fit by
chance."""


class Backbone(Protocol):
    """The layers with their norms: tokens [B, N] and one cache per layer -> [B, N, D]."""

    def __call__(self, tokens: mx.array, cache: Sequence[object] | None) -> mx.array: ...


class _GroupedMasks:
    """A layer's cache whose row masks are [B, 1, 1, N, T]."""

    def __init__(self, cache: object) -> None:
        self._cache = cache

    def make_mask(self, *given: object, **named: object) -> object:
        mask = self._cache.make_mask(*given, **named)  # type: ignore[attr-defined]
        rows = isinstance(mask, mx.array) and mask.ndim == 4
        return mask[:, :, None] if rows else mask

    def __getattr__(self, name: str) -> object:
        return getattr(self._cache, name)


def with_grouped_masks(read: Backbone) -> Backbone:
    """Return the backbone with row masks [B, 1, 1, N, T], on any caches."""

    def grouped(tokens: mx.array, cache: Sequence[object] | None) -> mx.array:
        return read(tokens, cache=None if cache is None else [_GroupedMasks(c) for c in cache])

    return grouped


def reads_windows(read: Backbone, cache: TreeCache) -> bool:
    """Whether each layer takes its mask from a cache with a window like its own.

    The backbone is called on an empty cache, on a prompt longer than any window. Nothing is
    computed.
    """
    longest = max(cache.windows.values(), default=0)
    cache.plan_prompt(2 * longest, 2)
    try:
        read(mx.zeros((1, 2), mx.int32), cache=cache.layers)
    except ValueError:  # MLX cannot broadcast the mask to the scores
        return False
    return True


def call_on_rows(read: Backbone, cache: TreeCache) -> mx.array | None:
    """Call the backbone on an empty cache with a mask for each batch row. Nothing is computed.

    Returns None if it does not take them.
    """
    offset, slots = mx.zeros((_ROWS,), mx.int32), mx.zeros((_ROWS, 1, 2, 1), mx.int32)
    mask = mx.ones((_ROWS, 1, 2, 4), mx.bool_)
    nodes = TreeNodes(mx.ones((_ROWS, 2, 2), mx.bool_), mx.zeros((_ROWS, 2), mx.int32), 1, False)
    whole = SlotPlan(mask, slots, None, extent=4, capacity=4)
    cache.plan_call(TreePlan(offset, whole, keep=False, nodes=nodes))
    try:
        return read(mx.zeros((_ROWS, 2), mx.int32), cache=cache.layers)
    except ValueError:  # MLX cannot broadcast the mask to the scores
        return None
