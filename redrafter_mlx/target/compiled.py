"""Graphs that are traced once for every size and replayed from then on.

An mlx-lm model builds its graph in Python, module by module, at every call, and so does a drafter.
Replaying a trace spares that and fuses elementwise operations; what is computed stays the same.

A trace holds the weights that were there when it was made, and MLX keeps traces by thread: when a
target is gone, a thread that called it, but not last, holds its weights until the thread ends.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import ParamSpec, TypeVar

import mlx.core as mx

from redrafter_mlx.target.kv_cache import TreeCache
from redrafter_mlx.target.layer_cache import LayerRows, TreePlan

_P = ParamSpec("_P")
_R = TypeVar("_R")

TreeCall = Callable[[mx.array, TreeCache, bool], tuple[mx.array, mx.array]]
"""tokens [B, N] of the tree that the cache is planned for -> hidden [B, N, C], logits [B, N, V].

The flag says whether to compile: a size that hardly comes again is built faster than compiled.
"""


def traced_call(
    backbone: Callable[..., mx.array], head: Callable[[mx.array], mx.array]
) -> TreeCall:
    """The backbone and the output layer behind it, as one call on a planned cache."""

    def build(
        tokens: mx.array,
        offset: mx.array,
        mask: mx.array,
        write_at: mx.array,
        gather: mx.array | None,
        sizes: tuple[int, int, bool],
        rows: Sequence[LayerRows],
    ) -> tuple[mx.array, mx.array, Sequence[LayerRows]]:
        cache = TreeCache.of(rows, TreePlan(offset, mask, write_at, gather, *sizes))
        hidden = backbone(tokens, cache=cache.layers)
        return hidden, head(hidden), cache.rows

    replay = replayed(build)

    def call(tokens: mx.array, cache: TreeCache, compiled: bool) -> tuple[mx.array, mx.array]:
        if not compiled:
            hidden = backbone(tokens, cache=cache.layers)
            return hidden, head(hidden)
        plan = cache.plan
        assert isinstance(plan, TreePlan)
        sizes = (plan.extent, plan.capacity, plan.keep)
        hidden, logits, cache.rows = replay(
            tokens, plan.offset, plan.mask, plan.write_at, plan.gather, sizes, cache.rows
        )
        return hidden, logits

    return call


def replayed(build: Callable[_P, _R]) -> Callable[_P, _R]:
    """`build`, traced once for all that it is given but the values of arrays.

    MLX finds traces by a function's address and may keep those of one that is gone. A number of
    its own, given with every call, keeps them from answering for the next function there.
    """

    def numbered(_: int, *given: _P.args, **named: _P.kwargs) -> _R:
        return build(*given, **named)

    return partial(mx.compile(numbered), secrets.randbits(62))
