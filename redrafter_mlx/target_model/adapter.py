"""Finds the parts of an mlx-lm model: its layers, embedding, output layer and rotary embeddings.

mlx-lm's architectures name their parts differently and share no base class. A missing part raises
a one-line error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import TypeVar

import mlx.core as mx
import mlx.nn as nn

from redrafter_mlx.cpu.door import fast_class
from redrafter_mlx.errors import UnsupportedModelError
from redrafter_mlx.target_model.recurrent.mixers import Mixers
from redrafter_mlx.target_model.wrapped_layers import (
    HiddenAsInput,
    LayerRecorder,
    LinearView,
    NodeScaledLayer,
    Rotations,
    recorded,
)

_Layer = TypeVar("_Layer", bound=nn.Module)

_BACKBONE_NAMES = ("model", "transformer", "backbone")
_HEAD_NAMES = ("lm_head", "output", "head")
_LAYERS_NAMES = ("layers", "h")
_INNER_HEAD = "embed_out"
"""GPT-NeoX has its output layer in the module of its layers."""
_ROPE_NAMES = ("rope", "rotary_emb")
_ROPE_TYPES = (
    "RoPE",
    "Llama3RoPE",
    "ProportionalRoPE",
    "SuScaledRoPE",
    "YarnRoPE",
    "DynamicNTKAlphaRoPE",
    "DeepseekV2YarnRotaryEmbedding",
)
"""Classes of rotary embeddings whose frequencies do not depend on the length of the text."""
FAILURES = (TypeError, ValueError, AttributeError, IndexError, KeyError, NotImplementedError)
"""Exceptions of models whose code does not work on our caches."""


def unsupported(model_type: str, why: str) -> UnsupportedModelError:
    """Return the one-line error for a model that cannot be drafted for."""
    return UnsupportedModelError(
        f"{model_type} cannot be drafted for: {why}; mlx_lm.generate runs it undrafted"
    )


def failing(model_type: str, what: str, failure: Exception) -> UnsupportedModelError:
    """Return the error for a model that fails on what its own caches can do."""
    reason = " ".join(f"{type(failure).__name__}: {failure}".split())
    return unsupported(model_type, f"it fails on {what} ({reason})")


@contextmanager
def unsupported_if_failing(model_type: str, what: str) -> Iterator[None]:
    """Raise UnsupportedModelError if the model, whose own calls work, fails on our caches."""
    try:
        yield
    except FAILURES as failure:
        raise failing(model_type, what, failure) from failure


def find_backbone(model: nn.Module, model_type: str) -> tuple[str, nn.Module]:
    """Return the name and module of the layers with their norms, without the output layer."""
    for name in _BACKBONE_NAMES:
        backbone = model.get(name)
        if isinstance(backbone, nn.Module):
            return name, backbone
    raise unsupported(model_type, "its layers are not a module apart from its output layer")


def _layers_name(backbone: nn.Module) -> str:
    return next((name for name in _LAYERS_NAMES if name in backbone), "")


def layers_of(backbone: nn.Module, model_type: str) -> Sequence[Callable[..., mx.array]]:
    """Return the layers, first to last."""
    layers = backbone.get(_layers_name(backbone))
    if not isinstance(layers, (list, tuple)):
        raise unsupported(model_type, "its layers are not a list that a drafter could read from")
    return layers


def recording(
    backbone: nn.Module, indices: Sequence[int], model_type: str
) -> Callable[..., tuple[list[mx.array], mx.array]]:
    """Return the backbone as a function that also returns the inputs of layers `indices`.

    The number of layers stands for the input of the final norm.
    """
    view = copy.copy(backbone)
    layers = list(layers_of(view, model_type))
    recorders = []
    for i in indices:
        at, last = (i, False) if i < len(layers) else (i - 1, True)
        layers[at] = recorder = LayerRecorder(layers[at], output=last)
        recorders.append(recorder)
    setattr(view, _layers_name(view), layers)
    return recorded(view, recorders)


def scale_by_node(backbone: nn.Module) -> None:
    """Let layers that scale queries by position, as Ministral 3's do, take node positions."""
    layers = backbone.get(_layers_name(backbone)) or ()  # None if another rank holds it
    kinds = {type(layer) for layer in layers if layer is not None}
    if any("attn_scale" in signature(kind.__call__).parameters for kind in kinds):
        rope = backbone.args.rope_parameters
        scaled = [None if layer is None else NodeScaledLayer(layer, rope) for layer in layers]
        setattr(backbone, _layers_name(backbone), scaled)


def find_head(model: nn.Module) -> nn.Module | None:
    """Return the output layer, None if it is tied to the embedding."""
    backbones = [model[name] for name in _BACKBONE_NAMES if isinstance(model.get(name), nn.Module)]
    places = [(model, name) for name in _HEAD_NAMES] + [(b, _INNER_HEAD) for b in backbones]
    return next((head for module, name in places if (head := module.get(name)) is not None), None)


def find_embedding(backbone: nn.Module, model_type: str) -> nn.Module:
    """Return the token embedding."""
    for child in backbone.children().values():
        if isinstance(child, (nn.Embedding, nn.QuantizedEmbedding)):
            return child
    raise unsupported(model_type, "its token embedding was not found")


def with_node_positions(
    module: nn.Module, mixers: Mixers | None = None
) -> tuple[nn.Module, Rotations, list[LinearView]]:
    """Copy the modules, sharing all arrays, with rotary embeddings that take node positions.

    On a CPU, the copies compute attention and SwiGLU by faster functions. With `mixers`, the copies
    of those take trees.

    Returns the copy, and the rotary embeddings and linear layers in it.
    """
    rotations, found = Rotations(), list[LinearView]()
    copies: dict[int, object] = {}

    def visit(value: object, name: str) -> object:
        if isinstance(value, nn.Module):
            if name in _ROPE_NAMES and type(value).__name__ in _ROPE_TYPES:
                return rotations.wrap(value)
            if name in _ROPE_NAMES and type(value).__name__ != "NoPE":
                rotations.others.add(type(value).__name__)
            if type(value) is nn.Linear:
                found.append(LinearView(value))
                return found[-1]
            if mixers is not None and (layer := mixers.layer(value)) is not None:
                return layer
            if id(value) not in copies:
                clone = copies[id(value)] = copy.copy(value)
                kind = fast_class(type(value))
                clone.__class__ = kind if mixers is None else mixers.class_of(value, kind)
                for key, child in list(value.items()):
                    setattr(clone, key, visit(child, key))
            return copies[id(value)]
        if isinstance(value, (list, tuple)):
            return type(value)(visit(item, name) for item in value)
        if isinstance(value, dict):
            return {key: visit(item, key) for key, item in value.items()}
        return value

    clone = visit(module, "")
    linears = [*found]
    for held in (copies, found):  # `visit` refers to itself, and lives until a garbage collection
        held.clear()
    assert isinstance(clone, nn.Module)
    return clone, rotations, linears


def without_head(backbone: nn.Module) -> None:
    """Let the backbone return hidden states if its output layer is in it."""
    if _INNER_HEAD in backbone:
        backbone[_INNER_HEAD] = nn.Identity()


def restricted_to(layer: _Layer, rows: mx.array | slice | None) -> _Layer:
    """Restrict an embedding or linear layer, quantised or not, to some rows; None keeps all.

    Rows [V'] are copied; those of a slice are a view.
    """
    if rows is None:
        return layer
    view = copy.copy(layer)
    for name in ("weight", "scales", "biases", "bias"):
        if layer.get(name) is not None:
            view[name] = layer[name][rows]
    mx.eval(view.parameters())
    return view


def head_of(
    model: nn.Module, model_type: str, rows: mx.array | slice | None = None
) -> Callable[[mx.array], mx.array]:
    """Return the model without its layers: hidden states in, logits of some tokens or all out.

    The model's own code applies its scaling and soft caps to the logits. Code that reads the shape
    of its tokens, as Mamba's, gets the positions of all rows in one axis.
    """
    name, backbone = find_backbone(model, model_type)
    if _INNER_HEAD in backbone:
        inner: Callable[[mx.array], mx.array] = restricted_to(backbone[_INNER_HEAD], rows)
        return inner
    backbone = copy.copy(backbone)
    embedding = find_embedding(backbone, model_type)
    if find_head(model) is None:
        for key, child in list(backbone.items()):
            if child is embedding:
                backbone[key] = restricted_to(child, rows)
    view = copy.copy(model)
    view[name] = HiddenAsInput(backbone)
    for key in _HEAD_NAMES:
        if isinstance(model.get(key), nn.Module):
            view[key] = restricted_to(model[key], rows)

    def of_positions(hidden: mx.array) -> mx.array:
        out: mx.array = view(hidden.flatten(0, -2))
        return out.reshape(*hidden.shape[:-1], -1)

    try:
        view(embedding(mx.array([[0]])))  # nothing is computed
    except ValueError:
        return of_positions
    whole: Callable[[mx.array], mx.array] = view
    return whole
