"""mlx-lm's mixers, unmodified, with recurrences and convolutions that know the tree of a call.

A mixer reads its states from its cache, passes them to one function of its module, and calls
`nn.Conv1d` layers. A copy of the mixer, of a class with the same code, calls ours instead. These
find the tree in the cache that the mixer was called on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from types import FunctionType

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import bailing_hybrid, bailing_moe_linear
from mlx_lm.models.gated_delta import gated_delta_update
from mlx_lm.models.ssm import ssm_update

from redrafter_mlx.target_model.recurrent.convolution import Convolution
from redrafter_mlx.target_model.recurrent.fixed_decay import FixedDecay
from redrafter_mlx.target_model.recurrent.gated_delta import GatedDelta
from redrafter_mlx.target_model.recurrent.interface import Recurrence
from redrafter_mlx.target_model.recurrent.state_cache import StateCache
from redrafter_mlx.target_model.recurrent.state_space import StateSpace

RECURRENCES: Sequence[tuple[object, Recurrence]] = (
    (gated_delta_update, GatedDelta()),
    (ssm_update, StateSpace()),
    (bailing_hybrid.recurrent_gla, FixedDecay(bailing_hybrid.recurrent_gla)),
    (bailing_moe_linear.recurrent_gla, FixedDecay(bailing_moe_linear.recurrent_gla)),
)
"""Functions of mlx-lm's modules, and the recurrences that compute them on trees."""

_CONVOLUTION = Convolution()


class Mixers:
    """The mixers of one network, while it is called on one layer after the other."""

    def __init__(self) -> None:
        self._cache: StateCache | None = None  # of the mixer that is called
        self._classes: dict[type[nn.Module], type[nn.Module]] = {}

    def convolution(self, layer: nn.Conv1d) -> _NodeConv1d:
        """Wrap a mixer's convolution so that it takes trees."""
        return _NodeConv1d(layer, self._on_cache(_CONVOLUTION))

    def class_of(self, module: nn.Module, kind: type[nn.Module]) -> type[nn.Module]:
        """Return the class of a copy of a module: `kind`, or its subclass if it is a mixer."""
        if "cache" not in signature(kind.__call__).parameters:
            return kind
        holds = any(type(child) is nn.Conv1d for child in module.children().values())
        methods = {name: ours for name in dir(kind) if (ours := self._with_ours(kind, name))}
        if not (methods or holds):
            return kind
        if kind not in self._classes:
            call = self._announcing(methods.get("__call__", kind.__call__))
            self._classes[kind] = type(kind.__name__, (kind,), {**methods, "__call__": call})
        return self._classes[kind]

    def _with_ours(self, kind: type[nn.Module], name: str) -> FunctionType | None:
        """Return a method that calls our recurrences; None if it calls none of mlx-lm's."""
        method = getattr(kind, name)
        if not isinstance(method, FunctionType):
            return None
        known = method.__globals__
        ours = {
            called: self._on_cache(found)
            for called in method.__code__.co_names
            for function, found in RECURRENCES
            if known.get(called) is function
        }
        if not ours:
            return None
        mine = FunctionType(method.__code__, {**known, **ours}, name, method.__defaults__,
                            method.__closure__)  # fmt: skip
        mine.__kwdefaults__ = method.__kwdefaults__
        return mine

    def _announcing(self, call: Callable[..., mx.array]) -> Callable[..., mx.array]:
        """Return a mixer's call that names the cache it is called on."""
        parameters = signature(call)

        def announced(mixer: nn.Module, *given: object, **named: object) -> mx.array:
            cache = parameters.bind(mixer, *given, **named).arguments.get("cache")
            self._cache = cache if isinstance(cache, StateCache) else None
            return call(mixer, *given, **named)

        return announced

    def _on_cache(self, recurrence: Recurrence) -> Callable[..., object]:
        """Return mlx-lm's function, but for trees the recurrence's tree form."""

        def call(*given: object, **named: object) -> object:
            cache = self._cache
            nodes = None if cache is None else cache.nodes
            if cache is None or nodes is None:
                return recurrence.function(*given, **named)
            result, tape = recurrence.on_tree(nodes, *given, **named)
            cache.record(recurrence, tape)
            return result

        return call


class _NodeConv1d:
    """A mixer's convolution that takes trees."""

    def __init__(self, layer: nn.Conv1d, call: Callable[..., object]) -> None:
        self._layer, self._call = layer, call

    def __call__(self, rows: mx.array) -> object:
        return self._call(self._layer, rows)

    def __getattr__(self, name: str) -> object:
        return getattr(self._layer, name)
