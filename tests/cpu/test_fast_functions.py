"""Attention and SwiGLU on a CPU: mlx-lm's to rounding, in every module of the target."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import activations, base, gpt_oss, llama
from mlx_lm.models.switch_layers import SwiGLU
from primitives import launched
from tiny import byte_model

from redrafter_mlx.cpu import fast_functions
from redrafter_mlx.cpu.fast_functions import (
    FEW_SCORES,
    KEPT,
    attention,
    compiled,
    gated,
    parts_of_exp,
    swiglu,
    with_fast_functions,
)
from redrafter_mlx.runtime.device import backend
from redrafter_mlx.target_model.adapter import with_node_positions

GRID = np.linspace(-60, 60, 600_001, dtype=np.float32)


def test_swiglu_is_silu_to_rounding_in_float32() -> None:
    exact = GRID.astype(float) / (1 + np.exp(-GRID.astype(float)))
    found = np.array(swiglu(mx.array(GRID), mx.ones(GRID.shape)))
    eps = np.finfo(np.float32).eps
    assert np.all(np.abs(found - exact) <= 2 * eps * np.maximum(np.abs(exact), 1))


def test_swiglus_extremes_are_mlx_lms() -> None:
    odd = mx.array([0.0, -0.0, 1e30, -1e30, np.inf, np.nan, 1e-40])
    one = mx.ones(odd.shape)
    np.testing.assert_allclose(swiglu(odd, one), activations.swiglu(odd, one), rtol=1e-6)


def test_swiglu_is_a_few_loops_over_whole_arrays(tmp_path: Path) -> None:
    """A number that MLX broadcasts outside of a loop keeps that loop from being vectorised."""
    gate, x = mx.zeros((2, 3, 64)), mx.ones((2, 3, 64))
    mx.eval(gate, x)
    for compute in (swiglu, mx.compile(swiglu)):
        mx.export_to_dot(str(tmp_path / "swiglu.dot"), compute(gate, x))
        nodes = re.findall(r'label ="([^"]*)"', (tmp_path / "swiglu.dot").read_text())
        assert "Broadcast" not in nodes
        assert len([node for node in nodes if node.startswith("Compiled")]) <= 5
        assert len(nodes) <= 8


def test_functions_stay_compiled_for_the_last_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = []

    def counted(*given: mx.array) -> mx.array:
        traced.append(given[0].shape)
        return gated(*given)

    monkeypatch.setattr(fast_functions, "gated", counted)
    compiled.cache_clear()
    shapes = [(n,) for n in range(1, 81)]
    for shape in (*shapes, *shapes[-KEPT:]):
        swiglu(mx.zeros(shape), mx.zeros(shape))
    assert traced == shapes
    swiglu(mx.zeros(shapes[0]), mx.zeros(shapes[0]))
    assert traced == [*shapes, shapes[0]]
    compiled.cache_clear()


def test_swiglus_gradients_are_mlx_lms() -> None:
    given = [mx.random.normal((3, 8), key=mx.random.key(n)) for n in range(2)]

    def gradients(function: Callable[..., mx.array]) -> list[mx.array]:
        return list(mx.grad(lambda *of: mx.sum(mx.sin(function(*of))), argnums=(0, 1))(*given))

    wanted = gradients(activations.swiglu)
    for mine in (gradients(swiglu), gradients(mx.compile(swiglu))):
        assert all(mx.allclose(a, b, atol=1e-6) for a, b in zip(mine, wanted, strict=True))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_swiglu_of_other_dtypes_is_mlx_lms_own(dtype: mx.Dtype) -> None:
    gate, x = mx.array(GRID[::999]).astype(dtype), mx.array(GRID[::999] * 0.5 + 1).astype(dtype)
    assert mx.array_equal(swiglu(gate, x), activations.swiglu(gate, x), equal_nan=True)


@pytest.mark.skipif(backend() != "cpu", reason="on a GPU, modules stay as they are")
def test_a_targets_copy_computes_it_and_the_callers_model_stays() -> None:
    model = byte_model()
    kinds = {type(module) for module in model.modules()}
    view, _, _ = with_node_positions(model.model)
    mine, theirs = view.layers[0].mlp, model.layers[0].mlp
    assert type(mine) is with_fast_functions(llama.MLP)
    assert isinstance(mine, llama.MLP)
    assert {type(module) for module in model.modules()} == kinds
    x = mx.random.normal((1, 5, model.args.hidden_size), key=mx.random.key(0))
    assert mx.allclose(mine(x), theirs(x), rtol=1e-5, atol=1e-6)
    assert mine.gate_proj.weight is theirs.gate_proj.weight


def softmax_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, seen: np.ndarray
) -> np.ndarray:
    """Attention in float64, one head at a time."""
    B, H, N, _ = q.shape
    out = np.zeros((B, H, N, v.shape[-1]))
    for b in range(B):
        for h in range(H):
            kv = h // (H // k.shape[1])
            scores = q[b, h].astype(float) @ k[b, kv].astype(float).T * scale
            scores = np.where(seen[b, h], scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[b, h] = weights / weights.sum(-1, keepdims=True) @ v[b, kv].astype(float)
    return out


@pytest.mark.parametrize("kind", ["none", "causal", "one for all", "one for each", "one score"])
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_attention_is_softmax_to_rounding_in_float32(kind: str, spread: float) -> None:
    B, H, K, N, T, D = 2, 6, 2, 33, 70, 16
    random = np.random.default_rng(0)
    q, k, v = (
        random.standard_normal(shape, dtype=np.float32)
        for shape in ((B, H, N, D), (B, K, T, D), (B, K, T, 8))
    )
    q *= spread
    assert B * H * N * T >= FEW_SCORES
    masks = {
        "none": np.ones((N, T), bool),
        "causal": np.arange(T) <= np.arange(T - N, T)[:, None],
        "one for all": random.random((N, T)) < 0.5,
        "one for each": random.random((B, 1, N, T)) < 0.5,
        "one score": np.arange(T) == np.arange(N)[:, None],
    }
    seen = np.broadcast_to(masks[kind], (B, H, N, T))
    mask = {"none": None, "causal": "causal"}.get(kind, mx.array(masks[kind]))
    found = attention(*map(mx.array, (q, k, v)), None, D**-0.5, mask)
    wanted = softmax_attention(q, k, v, D**-0.5, seen)
    theirs = base.scaled_dot_product_attention(
        *map(mx.array, (q, k, v)), cache=None, scale=D**-0.5, mask=mask
    )
    error = np.abs(np.array(found) - wanted).max()
    assert error <= 3 * np.abs(np.array(theirs) - wanted).max() + 2e-7
    assert error < 3e-5


def test_unseen_keys_weigh_nothing_and_slow_nothing_down() -> None:
    """Products of values with subnormal weights take many times as long on Intel's processors."""
    scores = mx.array([0.0, -1e3, mx.finfo(mx.float32).min])
    fraction, power = parts_of_exp(scores, 1.0)
    seen, *unseen = (fraction * power.view(mx.float32)).tolist()
    assert seen == 1.0
    for weight in unseen:
        assert weight * 2**-40 >= np.finfo(np.float32).tiny
        assert np.float32(seen) + np.float32(weight * 2**50) == seen


def test_attention_holds_few_scores_at_once() -> None:
    """All of them are 64 MB here, as much as MLX's own attention holds."""
    q, k, v = (mx.random.normal((1, 4, 2000, 16), key=mx.random.key(n)) for n in range(3))
    mx.eval(q, k, v)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(attention(q, k, v, None, 0.25, "causal"))
    assert mx.get_peak_memory() - before < 56e6


@pytest.mark.parametrize("case", ["float16", "few", "added mask", "sinks"])
def test_what_the_attention_here_does_not_compute_is_mlx_lms_own(case: str) -> None:
    dtype = mx.float16 if case == "float16" else mx.float32
    N = 2 if case == "few" else 40
    q, k, v = (mx.random.normal((1, 4, n, 8), key=mx.random.key(n)) for n in (N, 90, 90))
    mask = mx.zeros((N, 90)) if case == "added mask" else None
    given = {"sinks": mx.zeros(4)} if case == "sinks" else {}
    arrays = [a.astype(dtype) for a in (q, k, v)]
    ours = attention(*arrays, None, 0.3, mask, **given)
    theirs = base.scaled_dot_product_attention(*arrays, None, 0.3, mask, **given)
    assert mx.array_equal(ours, theirs)


def test_only_modules_that_call_mlx_lms_functions_get_another_class() -> None:
    for kind in (nn.Linear, nn.RMSNorm, nn.GELU, llama.TransformerBlock, llama.LlamaModel):
        assert with_fast_functions(kind) is kind
    for kind in (llama.MLP, llama.Attention, gpt_oss.AttentionBlock, SwiGLU):
        assert with_fast_functions(kind) is not kind
    gate, x = mx.random.normal((2, 3, 8), key=mx.random.key(1))
    assert mx.allclose(with_fast_functions(SwiGLU)()(x, gate), SwiGLU()(x, gate), atol=1e-6)


@pytest.mark.parametrize("keys", [2048, 40_000])
def test_a_chunk_reads_the_keys_once_for_two_dozen_rows_at_least(keys: int) -> None:
    """Each part of the rows multiplies by all keys, and by all values."""
    shapes = (1, 4, 96, 8), (1, 2, keys, 8), (1, 2, keys, 8)
    given = [mx.zeros(shape) for shape in shapes]
    products = launched([attention(*given, None, 0.3, "causal")])["Matmul"]
    assert 0 < products <= 2 * 96 // 24
