"""Calls that find out, before anything is computed, how a model uses our caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from redrafter_mlx.errors import UnsupportedModelError
from redrafter_mlx.runtime.device import backend
from redrafter_mlx.target_model.adapter import FAILURES, failing, unsupported
from redrafter_mlx.target_model.cache.forms import CacheForm, with_caches_of
from redrafter_mlx.target_model.cache.kv_cache import TreeCache
from redrafter_mlx.target_model.cache.packed_cache import (
    IN_ATTENTION,
    Packing,
    group_of,
)
from redrafter_mlx.target_model.recurrent.state_cache import Recurrences, StateCache
from redrafter_mlx.target_model.row_masks import Backbone, call_on_rows


@dataclass(frozen=True)
class Probed:
    """What a model does with our caches.

    grouped: whether its masks for batch rows are [B, 1, 1, N, T], see `row_masks`
    used:    for each of the caches that it makes, whether a layer uses it; by index of these:
    states:  what computes recurrent states
    windows: sizes of sliding windows
    head_sizes: of keys and of values, of layers that keep all positions
    """

    grouped: bool
    used: list[bool]
    states: Mapping[int, Recurrences]
    windows: Mapping[int, int]
    head_sizes: frozenset[int]


def probe(
    model: nn.Module,
    backbone: Backbone,
    forms: Sequence[CacheForm],
    hidden_size: int,
    model_type: str,
) -> Probed:
    """Find out which layers keep keys, and which form of row masks the backbone takes.

    Raises UnsupportedModelError for one that returns or masks something else, and its own error if
    it cannot even be called.
    """
    tokens = mx.zeros((1, 2), mx.int32)
    sizes = [size for form in forms for size in form.states]
    windows = [size for form in forms for size in form.windows]
    unknown = {i: (None,) * size for i, size in enumerate(sizes) if size}
    cache = TreeCache(len(sizes), unknown)
    on_caches = with_caches_of(forms, [True] * len(sizes), backbone)
    try:
        hidden = call_on_rows(on_caches, cache)
        grouped = hidden is None
        if hidden is None:
            cache = TreeCache(len(sizes), unknown)
            cache.plan_prompt(0, 2)
            hidden = on_caches(tokens, cache=cache.layers)
    except FAILURES as failure:
        backbone(tokens, cache=make_prompt_cache(model))
        raise failing(model_type, "our caches", failure) from failure
    if hidden.shape[-1] != hidden_size:
        raise unsupported(model_type, "its output layer is not apart from the module of its layers")
    held, masked = {size for size in windows if size is not None}, cache.masked_windows
    if not held <= masked:
        raise unsupported(
            model_type, f"its caches hold {sorted(held)} positions, its masks {sorted(masked)}"
        )
    found = [layer.recurrences for layer in cache.recurrent]
    if any(None in recurrences for recurrences in found):
        raise unsupported(
            model_type, "it keeps ArraysCache, for a recurrence that has no form for trees"
        )
    used = [(layer, size) for layer, size in zip(cache.layers, windows, strict=True) if layer.used]
    whole = [layer for layer, size in used if size is None and not isinstance(layer, StateCache)]
    return Probed(
        grouped,
        [layer.used for layer in cache.layers],
        {
            i: tuple(layer.recurrences)
            for i, (layer, _) in enumerate(used)
            if isinstance(layer, StateCache)
        },
        {i: size for i, (_, size) in enumerate(used) if size is not None},
        frozenset(held.shape[-1] for layer in whole for held in layer.slots),
    )


def packing_of(
    probed: Probed,
    backbone: Backbone,
    forms: Sequence[CacheForm],
    bits: int,
    start: int,
    model_type: str,
) -> Packing:
    """Return how a model's keys and values are kept in 8 or 4 bits from a position on.

    Raises UnsupportedModelError if they cannot be, or if it keeps none of a whole text.
    """
    if not probed.head_sizes:
        raise UnsupportedModelError(
            f"{model_type} has nothing for kv_bits to quantise: none of its layers keeps the keys "
            f"and values of a whole text; leave kv_bits out"
        )
    if (group := group_of(probed.head_sizes)) is None:
        sizes = " and ".join(map(str, sorted(probed.head_sizes)))
        raise UnsupportedModelError(
            f"{model_type} takes no kv_bits: they are for groups of 64 or 32 numbers, and its "
            f"heads have {sizes}; leave kv_bits out"
        )
    call = with_caches_of(forms, probed.used, backbone)

    def empty(packing: Packing) -> TreeCache:
        return TreeCache(sum(probed.used), probed.states, probed.windows, packing=packing)

    taken = False
    with suppress(*FAILURES):  # of attention that is the model's own, or has sinks
        if not start:  # mlx-lm's function takes no others beside them
            taken = call_on_rows(call, empty(Packing(bits, group, True, True))) is not None
    packing = Packing(bits, group, taken, taken and IN_ATTENTION[backend()], start)
    try:
        cache = empty(packing)
        cache.plan_prompt(0, 2)
        call(mx.zeros((1, 2), mx.int32), cache=cache.layers)
    except FAILURES as failure:
        raise UnsupportedModelError(
            f"{model_type} takes no kv_bits: {failure}; leave kv_bits out"
        ) from failure
    return packing
