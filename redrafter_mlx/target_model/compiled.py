"""Compiled graphs, one for each input size.

An mlx-lm model builds its graph in Python, module by module, at every call, and so does a drafter.
Compiling avoids that and fuses elementwise operations; the results stay the same.

A compiled graph holds the weights that it was compiled with, and MLX keeps compiled graphs per
thread. So after a target is deleted, a thread that called it, but was not the last to call it,
holds its weights until the thread ends.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Generic, ParamSpec, TypeAlias, TypeVar

import mlx.core as mx

from redrafter_mlx.target_model.cache.kv_cache import TreeCache
from redrafter_mlx.target_model.cache.layer_cache import LayerBuffers
from redrafter_mlx.target_model.cache.plans import PlanArrays, PlanSizes, TreePlan
from redrafter_mlx.target_model.wrapped_layers import LinearView, prepare

_P = ParamSpec("_P")
_R = TypeVar("_R")

Inputs: TypeAlias = "mx.array | tuple[mx.array, mx.array]"
"""Tokens [B, N] of a tree, or a pair: the tokens and another array with a value for each node."""

_CALLS_BEFORE_COMPILING = 4
"""Number of calls of a size before it is compiled: compiling costs about as much extra time as this
many compiled calls save."""

MAX_GRAPHS = 96
"""Maximum number of graphs of one function; the least recently used ones are dropped. Batches of
every size, over trees of every size and texts of every length, would be thousands."""


class CompiledGraphs(Generic[_P, _R]):
    """A function compiled once for each size of its arguments, for a bounded number of sizes.

    compiled: number of sizes compiled so far, including those dropped since
    """

    def __init__(self, build: Callable[_P, _R]) -> None:
        self._build = build
        self.compiled = 0
        self._graphs: dict[Hashable, Callable[_P, _R]] = {}  # least recently used first

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, size: Hashable) -> bool:
        return size in self._graphs

    def call(self, size: Hashable, *given: _P.args, **named: _P.kwargs) -> _R:
        """Return the function's result; `size` differs if shapes or other arguments do."""
        graph = self._graphs.pop(size, None)
        if graph is None:
            graph = _compile(self._build)
            self.compiled += 1
        self._graphs[size] = graph
        if len(self._graphs) > MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        return graph(*given, **named)


class TreeCall:
    """The backbone and the output layer as one call on a planned cache.

    Maps inputs for the planned tree to hidden [B, N, C] and logits [B, N, V].

    built: number of calls so far that were built and not compiled, of sizes in use
    """

    def __init__(
        self,
        backbone: Callable[..., mx.array],
        head: Callable[[mx.array], mx.array],
        linears: Sequence[LinearView],
        new_cache: Callable[[], TreeCache],
    ) -> None:
        """`linears`, of the backbone, are prepared when the first graph is compiled."""

        def build(
            inputs: Inputs,
            arrays: PlanArrays,
            sizes: PlanSizes,
            buffers: Sequence[LayerBuffers],
        ) -> tuple[mx.array, mx.array, Sequence[LayerBuffers]]:
            cache = new_cache()
            cache.layer_buffers = buffers
            cache.plan_call(TreePlan.of(arrays, sizes))
            hidden = backbone(inputs, cache=cache.layers)
            return hidden, head(hidden), cache.layer_buffers

        self.graphs = CompiledGraphs(build)
        self._backbone, self._head, self._linears = backbone, head, linears
        self.uses: dict[Hashable, int] = {}  # of sizes not compiled yet, the latest last
        self._last: tuple[int, ...] = ()
        self.built = 0

    def __call__(
        self, inputs: Inputs, cache: TreeCache, compiled: bool = True
    ) -> tuple[mx.array, mx.array]:
        """Call the model. A size that comes seldom is built anew: that is faster than compiling it.

        `compiled` compiles the first call, trees as large as those of the call before, and roots
        alone: a tree that is tried once among plain steps is built. So is every other size, until
        it has come some times.
        """
        plan = cache.plan
        assert isinstance(plan, TreePlan)
        buffers, (arrays, sizes) = cache.layer_buffers, plan.split()
        tokens = inputs if isinstance(inputs, mx.array) else inputs[0]
        # One layer of each kind stands for the others; a path is as long as its tree was deep.
        of_keys = []
        for kind in cache.kinds:  # without a call: this is part of every step
            of_keys.append(kind.buffers)
        of_state = cache.recurrent[0].buffers if cache.recurrent else None
        size = (tokens.shape, sizes, _shapes((arrays, of_keys, of_state)))
        in_use = not self._last or tokens.shape in (self._last, (1, 1))
        self._last = tokens.shape
        if not (compiled and in_use) and size not in self.graphs:
            uses = self.uses.pop(size, 0)
            if uses < _CALLS_BEFORE_COMPILING:
                self.uses[size] = uses + 1
                if len(self.uses) > MAX_GRAPHS:
                    del self.uses[next(iter(self.uses))]
                self.built += compiled
                hidden = self._backbone(inputs, cache=cache.layers)
                return hidden, self._head(hidden)
        if not self.graphs.compiled:
            prepare(self._linears)
        hidden, logits, cache.layer_buffers = self.graphs.call(size, inputs, arrays, sizes, buffers)
        return hidden, logits


def _shapes(arrays: object) -> Hashable:
    """Return the shapes of nested tuples of arrays and of nothing, and how they are nested.

    Without recursion: this is part of every step.
    """
    found: list[object] = []
    left = [arrays]
    while left:
        one = left.pop()
        if isinstance(one, mx.array):
            found.append(one.shape)
        elif isinstance(one, (tuple, list)):
            found.append(len(one))
            left += one
        else:
            found.append(None)
    return tuple(found)


def _compile(build: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile the function.

    MLX looks up graphs by a function's address, and may keep the graphs of a deleted function. A
    random number in every call keeps the next function at that address from using them.
    """

    def numbered(_: int, *given: _P.args, **named: _P.kwargs) -> _R:
        return build(*given, **named)

    return partial(mx.compile(numbered), secrets.randbits(62))
