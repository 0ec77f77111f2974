"""mlx-lm's mixers, unmodified, with recurrences and convolutions that know the tree of a call.

A mixer reads its states from its cache, passes them to one function of its module or to a method
of its own, and calls `nn.Conv1d` or other layers that read the positions before. A copy of the
mixer, of a class with the same code, calls ours instead. These find the tree in the cache that the
mixer was called on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from types import FunctionType

import mlx.nn as nn
from mlx_lm.models import bailing_hybrid, bailing_moe_linear, recurrent_gemma, rwkv7
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.gated_delta import gated_delta_update
from mlx_lm.models.ssm import ssm_update

from redrafter_mlx.target_model.recurrent.convolution import Convolution
from redrafter_mlx.target_model.recurrent.fixed_decay import FixedDecay
from redrafter_mlx.target_model.recurrent.gated_delta import GatedDelta
from redrafter_mlx.target_model.recurrent.griffin import GatedConvolution, GatedScan
from redrafter_mlx.target_model.recurrent.head_convolution import HeadConvolution
from redrafter_mlx.target_model.recurrent.interface import Recurrence
from redrafter_mlx.target_model.recurrent.rwkv import ShiftedInputs, TimeMixing
from redrafter_mlx.target_model.recurrent.selective import JambaScan, MambaScan
from redrafter_mlx.target_model.recurrent.state_cache import StateCache
from redrafter_mlx.target_model.recurrent.state_space import StateSpace

RECURRENCES: Sequence[tuple[object, Recurrence]] = (
    (gated_delta_update, GatedDelta()),
    (ssm_update, StateSpace()),
    (bailing_hybrid.recurrent_gla, FixedDecay(bailing_hybrid.recurrent_gla)),
    (bailing_moe_linear.recurrent_gla, FixedDecay(bailing_moe_linear.recurrent_gla)),
    (recurrent_gemma.rnn_scan, GatedScan()),
)
"""Functions of mlx-lm's modules, and the recurrences that compute them on trees."""

METHODS: Sequence[Recurrence] = (JambaScan(), MambaScan(), TimeMixing(), HeadConvolution())
"""Recurrences whose function is a method of mlx-lm's mixer."""

LAYERS: Mapping[type[nn.Module], Recurrence] = {
    nn.Conv1d: Convolution(),
    recurrent_gemma.Conv1d: GatedConvolution(),
    rwkv7.TokenShift: ShiftedInputs(),
}
"""Layers in a mixer that read the positions before, and what computes them on trees."""

_CACHES = (ArraysCache, StateCache)
"""What a mixer that asks whether its cache is one of states is told."""


class Mixers:
    """The mixers of one network, while it is called on one layer after the other."""

    def __init__(self) -> None:
        self._cache: StateCache | None = None  # of the mixer that is called
        self._classes: dict[type[nn.Module], type[nn.Module]] = {}

    def layer(self, layer: nn.Module) -> _NodeLayer | None:
        """Wrap a layer that reads the positions before, so that it takes trees; None for others."""
        found = LAYERS.get(type(layer))
        return None if found is None else _NodeLayer(layer, self._on_cache(found))

    def class_of(self, module: nn.Module, kind: type[nn.Module]) -> type[nn.Module]:
        """Return the class of a copy of a module: `kind`, or its subclass if it is a mixer."""
        if "cache" not in signature(kind.__call__).parameters:
            return kind
        holds = any(type(child) in LAYERS for child in module.children().values())
        methods = {name: ours for name in dir(kind) if (ours := self._with_ours(kind, name))}
        if not (methods or holds):
            return kind
        if kind not in self._classes:
            call = self._announcing(methods.get("__call__", kind.__call__))
            self._classes[kind] = type(kind.__name__, (kind,), {**methods, "__call__": call})
        return self._classes[kind]

    def _with_ours(self, kind: type[nn.Module], name: str) -> Callable[..., object] | None:
        """Return a method that is, or calls, one of our recurrences; None for others."""
        method = getattr(kind, name)
        if not isinstance(method, FunctionType):
            return None
        for recurrence in METHODS:
            if recurrence.function is method:
                call = self._on_cache(recurrence)
                return lambda *given, **named: call(*given, **named)  # bound as a method
        known, called = method.__globals__, method.__code__.co_names
        ours = {
            name: self._on_cache(found)
            for name in called
            for function, found in RECURRENCES
            if known.get(name) is function
        }
        caches = {name: _CACHES for name in called if known.get(name) is ArraysCache}
        if not (ours or caches):
            return None
        mine = FunctionType(method.__code__, {**known, **ours, **caches}, name,
                            method.__defaults__, method.__closure__)  # fmt: skip
        mine.__kwdefaults__ = method.__kwdefaults__
        return mine

    def _announcing(self, call: Callable[..., object]) -> Callable[..., object]:
        """Return a mixer's call that names the cache it is called on.

        A module in it that is given a state as its `cache` goes on with the mixer's own.
        """
        parameters = signature(call)

        def announced(mixer: nn.Module, *given: object, **named: object) -> object:
            cache = parameters.bind(mixer, *given, **named).arguments.get("cache")
            members = cache if isinstance(cache, list) else [cache]
            outer, states = self._cache, [c for c in members if isinstance(c, StateCache)]
            self._cache = states[0] if states else outer
            try:
                return call(mixer, *given, **named)
            finally:
                self._cache = outer

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


class _NodeLayer:
    """A mixer's layer that takes trees."""

    def __init__(self, layer: nn.Module, call: Callable[..., object]) -> None:
        self._layer, self._call = layer, call

    def __call__(self, *given: object, **named: object) -> object:
        return self._call(self._layer, *given, **named)

    def __getattr__(self, name: str) -> object:
        return getattr(self._layer, name)
