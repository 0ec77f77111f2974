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
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Generic, ParamSpec, TypeAlias, TypeVar

import mlx.core as mx

from redrafter_mlx.target.kv_cache import TreeCache
from redrafter_mlx.target.layer_cache import LayerBuffers, TreePlan

_P = ParamSpec("_P")
_R = TypeVar("_R")

Inputs: TypeAlias = "mx.array | tuple[mx.array, mx.array]"
"""Tokens [B, N] of a tree, or a pair of them and something else of each node."""

_FEW = 4
"""Compiling takes about as much longer than building as so many compiled calls save."""

MOST_GRAPHS = 96
"""Of one function; beyond, those go that were not used for longest. Batches of every size, over
trees of every size and texts of every length, would be thousands."""


class CompiledGraphs(Generic[_P, _R]):
    """A function, compiled once for each size of its arguments, a bounded number of sizes.

    compiled: how many sizes were, those included that were dropped since
    """

    def __init__(self, build: Callable[_P, _R]) -> None:
        self._build = build
        self.compiled = 0
        self._graphs: dict[Hashable, Callable[_P, _R]] = {}  # the least recently used first

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, size: Hashable) -> bool:
        return size in self._graphs

    def call(self, size: Hashable, *given: _P.args, **named: _P.kwargs) -> _R:
        """The function's result; `size` differs where shapes or other arguments do."""
        graph = self._graphs.pop(size, None)
        if graph is None:
            graph = _compile(self._build)
            self.compiled += 1
        self._graphs[size] = graph
        if len(self._graphs) > MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        return graph(*given, **named)


class TreeCall:
    """The backbone and the output layer as one call on a planned cache.

    Inputs of the tree that the cache is planned for -> hidden [B, N, C], logits [B, N, V].
    """

    def __init__(
        self, backbone: Callable[..., mx.array], head: Callable[[mx.array], mx.array]
    ) -> None:
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

        self.graphs = CompiledGraphs(build)
        self._backbone, self._head = backbone, head
        self._uses: Counter[Hashable] = Counter()  # of sizes that are not compiled

    def __call__(
        self, inputs: Inputs, cache: TreeCache, compiled: bool = True
    ) -> tuple[mx.array, mx.array]:
        """`compiled`: at once; otherwise when the size has been used a few times.

        A size that is rarely used is built faster than compiled.
        """
        plan = cache.plan
        assert isinstance(plan, TreePlan)
        buffers, sizes = cache.layer_buffers, (plan.extent, plan.capacity, plan.keep)
        tokens = inputs if isinstance(inputs, mx.array) else inputs[0]
        shapes = [None if a is None else a.shape for a in (plan.gather, *buffers[0])]
        size = (tokens.shape, plan.offset.shape, plan.mask.shape, *sizes, *shapes)
        if not compiled and size not in self.graphs:
            self._uses[size] += 1
            if self._uses[size] <= _FEW:
                hidden = self._backbone(inputs, cache=cache.layers)
                return hidden, self._head(hidden)
            del self._uses[size]
        hidden, logits, cache.layer_buffers = self.graphs.call(
            size, inputs, plan.offset, plan.mask, plan.write_at, plan.gather, sizes, buffers
        )
        return hidden, logits


def _compile(build: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function, compiled.

    MLX looks graphs up by a function's address, and may keep those of a deleted function. A random
    number in every call keeps them from being used for the next function at that address.
    """

    def numbered(_: int, *given: _P.args, **named: _P.kwargs) -> _R:
        return build(*given, **named)

    return partial(mx.compile(numbered), secrets.randbits(62))
