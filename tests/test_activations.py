"""SwiGLU on a CPU: mlx-lm's to rounding, in every module of the target that calls it."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import activations, llama
from mlx_lm.models.switch_layers import SwiGLU
from tiny import byte_model

from redrafter_mlx.runtime.device import backend
from redrafter_mlx.target.activations import swiglu, with_fast_swiglu
from redrafter_mlx.target.adapter import with_node_positions

GRID = np.linspace(-60, 60, 600_001, dtype=np.float32)


def test_it_is_silu_to_rounding_in_float32() -> None:
    exact = GRID.astype(float) / (1 + np.exp(-GRID.astype(float)))
    found = np.array(swiglu(mx.array(GRID), mx.ones(GRID.shape)))
    eps = np.finfo(np.float32).eps
    assert np.all(np.abs(found - exact) <= 2 * eps * np.maximum(np.abs(GRID), 1))


def test_extremes_are_mlx_lms() -> None:
    odd = mx.array([0.0, -0.0, 1e30, -1e30, np.inf, np.nan, 1e-40])
    one = mx.ones(odd.shape)
    np.testing.assert_allclose(swiglu(odd, one), activations.swiglu(odd, one), rtol=1e-6)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_other_dtypes_get_mlx_lms_own(dtype: mx.Dtype) -> None:
    gate, x = mx.array(GRID[::999]).astype(dtype), mx.array(GRID[::999] * 0.5 + 1).astype(dtype)
    assert mx.array_equal(swiglu(gate, x), activations.swiglu(gate, x), equal_nan=True)


@pytest.mark.skipif(backend() != "cpu", reason="on a GPU, modules stay as they are")
def test_a_targets_copy_computes_it_and_the_callers_model_stays() -> None:
    model = byte_model()
    kinds = {type(module) for module in model.modules()}
    view, _, _ = with_node_positions(model.model)
    mine, theirs = view.layers[0].mlp, model.layers[0].mlp
    assert type(mine) is with_fast_swiglu(llama.MLP)
    assert isinstance(mine, llama.MLP)
    assert {type(module) for module in model.modules()} == kinds
    x = mx.random.normal((1, 5, model.args.hidden_size), key=mx.random.key(0))
    assert mx.allclose(mine(x), theirs(x), rtol=1e-5, atol=1e-6)
    assert mine.gate_proj.weight is theirs.gate_proj.weight


def test_only_modules_that_call_mlx_lms_swiglu_get_another_class() -> None:
    for kind in (nn.Linear, nn.RMSNorm, nn.GELU, llama.Attention, llama.TransformerBlock):
        assert with_fast_swiglu(kind) is kind
    for kind in (llama.MLP, SwiGLU):
        assert with_fast_swiglu(kind) is not kind
    gate, x = mx.random.normal((2, 3, 8), key=mx.random.key(1))
    assert mx.allclose(with_fast_swiglu(SwiGLU)()(x, gate), SwiGLU()(x, gate), atol=1e-6)
