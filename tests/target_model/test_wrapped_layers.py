"""Layers in a model's copy, against its own: rotary embeddings of tree nodes, and linear layers."""

from __future__ import annotations

from collections import Counter
from typing import cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.rope_utils import initialize_rope
from tiny import LLAMA3_ROPE, random_model

from redrafter_mlx.bench.programs.on_paper import operations
from redrafter_mlx.runtime.device import backend
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.target_model.wrapped_layers import LinearView, NodeRope, Rotations, prepare
from redrafter_mlx.tuning.profile import random_tree

ROPES = {
    "whole": nn.RoPE(8),
    "traditional": nn.RoPE(8, traditional=True),
    "partial": nn.RoPE(4, base=500.0),
    "partial, traditional": nn.RoPE(4, traditional=True),
    "scaled": nn.RoPE(8, scale=0.25),
    "llama3": initialize_rope(8, 10000.0, True, LLAMA3_ROPE, 512),
    "yarn": initialize_rope(
        8, 10000.0, False, {"rope_type": "yarn", "factor": 4.0,
                            "original_max_position_embeddings": 64}, 512),
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_shared_cosines_turn_as_the_models_own_embedding_bit_for_bit(
    name: str, dtype: mx.Dtype
) -> None:
    rotations = Rotations()
    node_rope, alone = rotations.wrap(ROPES[name]), NodeRope(ROPES[name])
    first = mx.random.normal((2, 3, 5, 8), key=mx.random.key(0)).astype(dtype)
    second = mx.random.normal((2, 1, 5, 8), key=mx.random.key(1)).astype(dtype)
    nodes = mx.random.randint(0, 4000, (2, 5), key=mx.random.key(2))
    for offset in (7, mx.array([900, 3]), nodes):
        turn_both = rotations.sharing(
            lambda at=offset: (node_rope(first, at), node_rope(second, at))
        )
        for x, turned in zip((first, second), turn_both(), strict=True):
            assert mx.array_equal(turned, alone(x, offset))
            assert turned.dtype == dtype


@pytest.mark.skipif(backend() != "cpu", reason="a GPU's kernel computes its own cosines")
def test_a_rotation_by_shared_cosines_copies_nothing() -> None:
    """It multiplies twice and adds, which one operation does once compiled."""
    rotations = Rotations()
    node_rope, x = rotations.wrap(ROPES["traditional"]), mx.zeros((1, 3, 5, 8))
    once = rotations.sharing(lambda: [node_rope(x, 7)])
    twice = rotations.sharing(lambda: [node_rope(x, 7), node_rope(x, 7)])
    one, two = (Counter(operations(turned())) for turned in (once, twice))
    views = {"Unflatten", "Slice", "Flatten", "Broadcast"}
    launched = {name: n for name, n in (two - one).items() if name not in views}
    assert launched == {"Multiply": 2, "Add": 1}


def test_each_node_is_turned_by_its_own_position() -> None:
    rope = nn.RoPE(8)
    x, positions = mx.random.normal((2, 3, 4, 8)), [[3, 4, 4, 5], [90, 91, 92, 91]]
    turned = Rotations().wrap(rope)(x, mx.array(positions))
    for b, row in enumerate(positions):
        for n, position in enumerate(row):
            alone = rope(x[b : b + 1, :, n : n + 1], offset=position)
            assert mx.array_equal(turned[b, :, n], alone[0, :, 0])


@pytest.mark.skipif(backend() != "cpu", reason="a GPU's kernel computes its own cosines")
@pytest.mark.parametrize("rows", [2, 10])
def test_a_calls_cosines_are_computed_once_for_all_layers(rows: int) -> None:
    counts = {}
    for layers in (1, 4):
        target = Target(random_model(num_hidden_layers=layers))
        cache = target.new_cache()
        mx.eval(target.append(mx.array([[1, 2, 3]]), cache, 0))
        tree = random_tree(rows, target.vocab_size)
        hidden, logits = target.verify(tree, cache, mx.array([3]), 3)
        counts[layers] = operations([hidden, logits, *cache.buffers])
    assert counts[1].count("Cos") == counts[4].count("Cos") == 1
    assert counts[1].count("Sin") == counts[4].count("Sin") == 1


def test_nothing_is_shared_after_a_call() -> None:
    """A second call rotates by its own positions."""
    model = random_model()
    target = Target(model)
    tokens = mx.array([[5, 6, 7]])
    for start in (0, 3):
        cache = target.new_cache()
        if start:
            target.append(mx.array([[1, 2, 3]]), cache, 0)
        text = mx.concatenate([mx.array([[1, 2, 3]])[:, :start], tokens], axis=1)
        logits = target.logits(target.append(tokens, cache, start))
        assert mx.allclose(logits, cast(mx.array, model(text))[:, start:], rtol=1e-4, atol=1e-4)


D, E = 24, 40


def layer_and_view(bias: bool) -> tuple[nn.Linear, LinearView]:
    layer = nn.Linear(D, E, bias=bias)
    mx.eval(layer.parameters())
    view = LinearView(layer)
    prepare([view])
    return layer, view


def numbers(*shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(sum(shape)))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "shape", [(D,), (5, D), (1, D), (1, 1, D), (1, 7, D), (3, 7, D), (1, 2, 3, D)]
)
def test_a_view_computes_the_same_bits(shape: tuple[int, ...], bias: bool) -> None:
    layer, view = layer_and_view(bias)
    x = numbers(*shape)
    assert np.array_equal(np.array(view(x)), np.array(layer(x)))


@pytest.mark.parametrize("bias", [False, True])
def test_one_sequence_takes_no_views(bias: bool) -> None:
    layer, view = layer_and_view(bias)
    x = numbers(1, 7, D)
    mx.eval(x)
    assert {*operations([view(x)])} == ({"AddMM", "Broadcast"} if bias else {"Matmul"})
    assert "Transpose" in operations([layer(x)])


def test_a_view_that_is_not_prepared_is_the_layer() -> None:
    layer = nn.Linear(D, E)
    x = numbers(1, 7, D)
    assert np.array_equal(np.array(LinearView(layer)(x)), np.array(layer(x)))


def test_a_view_has_its_layers_parameters_and_no_others() -> None:
    layer, view = layer_and_view(True)
    assert view.parameters().keys() == layer.parameters().keys()
    assert view.weight is layer.weight
    assert view.bias is layer.bias


def test_a_new_weight_replaces_what_was_prepared() -> None:
    """As in training, where every call has other weights."""
    _, view = layer_and_view(True)
    layer = nn.Linear(D, E)
    view.update(layer.parameters())
    x = numbers(1, 7, D)
    assert np.array_equal(np.array(view(x)), np.array(layer(x)))
