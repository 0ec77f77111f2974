"""Linear layers of a target: the same numbers from a smaller graph."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from redrafter_mlx.bench.programs.on_paper import operations
from redrafter_mlx.target_model.linear import LinearView, prepare

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
