"""The caches that an mlx-lm model makes for its layers, and ours in their places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    RotatingKVCache,
    make_prompt_cache,
)

from redrafter_mlx.target_model.adapter import unsupported
from redrafter_mlx.target_model.row_masks import Backbone

_TREES_IN_LISTS = ("deepseek_v32", "glm_moe_dsa", "longcat_flash")
"""Models whose layers keep several caches of keys that can all hold a tree: of two attentions, or
of one that reads only the keys that an indexer chooses, by the tree's mask."""

_WITHOUT_TREES = {
    "llama4": "it masks chunks of the text by the call's position, and each node has its own",
    "minimax_m3_vl": "it chooses blocks of cache slots by position, and a node's slot is another",
    "longcat_flash_ngram": "its embedding reads the tokens before each in the order of the call",
}
"""Modules of mlx-lm whose models take no tree, and why."""


class CacheForm(NamedTuple):
    """One cache of a model, or a list of several for one layer.

    states:  for each of them, its number of recurrent states; 0 for one of keys and values
    windows: for each of them, the size of its sliding window; None for one without
    """

    states: tuple[int, ...]
    windows: tuple[int | None, ...]
    is_list: bool


def check_cache(model: nn.Module, model_type: str) -> list[CacheForm]:
    """Return the forms of the model's caches.

    Raises UnsupportedModelError for layers that keep something that a tree cannot share.
    """
    module = type(model).__module__.rpartition(".")[2]
    if module in _WITHOUT_TREES:
        raise unsupported(model_type, _WITHOUT_TREES[module])
    if not hasattr(model, "layers"):
        raise unsupported(model_type, "its language model has no list of layers")
    made = make_prompt_cache(model)
    lists = [[*c.caches] if type(c) is CacheList else [c] for c in made]
    caches = [cache for members in lists for cache in members]
    others = {type(c).__name__ for c in caches} - {"KVCache", "RotatingKVCache", "ArraysCache"}
    of_keys = any(len(members) > 1 and not any(map(_states, members)) for members in lists)
    if of_keys and model_type not in _TREES_IN_LISTS:
        others.add("CacheList")
    if others:
        raise unsupported(
            model_type, f"it keeps {' and '.join(sorted(others))}, which cannot hold a tree"
        )
    return [
        CacheForm(tuple(map(_states, members)), tuple(map(_window, members)), type(c) is CacheList)
        for c, members in zip(made, lists, strict=True)
    ]


def _states(cache: object) -> int:
    return len(cache.cache) if isinstance(cache, ArraysCache) else 0


def _window(cache: object) -> int | None:
    return int(cache.max_size) if isinstance(cache, RotatingKVCache) else None


def with_caches_of(forms: Sequence[CacheForm], used: Sequence[bool], read: Backbone) -> Backbone:
    """Return the backbone as called on one cache for each layer that uses it, in a row.

    The model gives each of its layers a cache, and takes the mask from the first. A layer with a
    linear map in place of attention uses none, so it gets the one of the first layer that does.

    forms: of the caches that the model asks for
    used:  whether they are, in a row
    """
    if all(used) and not any(form.is_list for form in forms):
        return read

    def on_caches(tokens: mx.array, cache: Sequence[object] | None) -> mx.array:
        if cache is None:
            return read(tokens, cache=None)
        given = iter(cache)
        row = iter([next(given) if is_used else cache[0] for is_used in used])
        parts = [[next(row) for _ in form.states] for form in forms]
        nested = zip(forms, parts, strict=True)
        return read(tokens, cache=[p if form.is_list else p[0] for form, p in nested])

    return on_caches
