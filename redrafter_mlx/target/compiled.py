"""Compiled graphs, one for each size.

An mlx-lm model builds its graph in Python, module by module, at every call, and so does a drafter.
Compiling spares that and fuses elementwise operations; the results stay the same.

A compiled graph holds the weights it was compiled with, and MLX keeps compiled graphs by thread:
after a target is deleted, a thread that called it, but not last, holds its weights until the thread
ends.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import ParamSpec, TypeAlias, TypeVar

import mlx.core as mx

from redrafter_mlx.target.kv_cache import TreeCache
from redrafter_mlx.target.layer_cache import LayerBuffers, TreePlan

_P = ParamSpec("_P")
_R = TypeVar("_R")

Inputs: TypeAlias = "mx.array | tuple[mx.array, mx.array]"
"""Tokens [B, N] of a tree, or a pair of them and something else of each node."""

TreeCall = Callable[[Inputs, TreeCache, bool], tuple[mx.array, mx.array]]
"""Inputs of the tree that the cache is planned for -> hidden [B, N, C], logits [B, N, V].

The flag says whether to compile at once: a size that is rarely used is built faster than compiled.
Without it, a size is compiled when it has been used a few times.
"""

_FEW = 4
"""Compiling takes about as much longer than building as so many compiled calls save."""


def compile_tree_call(
    backbone: Callable[..., mx.array], head: Callable[[mx.array], mx.array]
) -> TreeCall:
    """The backbone and the output layer as one call on a planned cache."""

    def build(
        inputs: Inputs,
        offset: mx.array,
        mask: mx.array,
        write_at: mx.array,
        gather: mx.array | None,
        sizes: tuple[int, int, bool],
        buffers: Sequence[LayerBuffers],
    ) -> tuple[mx.array, mx.array, Sequence[LayerBuffers]]:
        cache = TreeCache.of(buffers, TreePlan(offset, mask, write_at, gather, *sizes))
        hidden = backbone(inputs, cache=cache.layers)
        return hidden, head(hidden), cache.layer_buffers

    compiled_build = compile_graph(build)
    uses: Counter[tuple[int, ...]] = Counter()

    def call(inputs: Inputs, cache: TreeCache, compiled: bool) -> tuple[mx.array, mx.array]:
        plan = cache.plan
        assert isinstance(plan, TreePlan)
        sizes = (plan.extent, plan.capacity, plan.keep)
        if not compiled:
            size = (*plan.mask.shape, *sizes)
            uses[size] += 1
            if uses[size] <= _FEW:
                hidden = backbone(inputs, cache=cache.layers)
                return hidden, head(hidden)
        hidden, logits, cache.layer_buffers = compiled_build(
            inputs, plan.offset, plan.mask, plan.write_at, plan.gather, sizes, cache.layer_buffers
        )
        return hidden, logits

    return call


def compile_graph(build: Callable[_P, _R]) -> Callable[_P, _R]:
    """`build`, compiled once for each combination of shapes and other arguments.

    MLX looks graphs up by a function's address, and may keep those of a deleted function. A random
    number in every call keeps them from being used for the next function at that address.
    """

    def numbered(_: int, *given: _P.args, **named: _P.kwargs) -> _R:
        return build(*given, **named)

    return partial(mx.compile(numbered), secrets.randbits(62))
