"""Attention and SwiGLU on a CPU, where MLX takes some 20 ns for each exponential function.

mlx-lm's modules call two functions that do: `scaled_dot_product_attention` and `swiglu`. Those here
compute the same, to rounding in float32, by polynomials, of which a C++ compiler makes vector
instructions. A copy of a module, of a class with the same code, calls them instead.
"""

from __future__ import annotations

from functools import lru_cache, partial
from types import FunctionType

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations, base

_MOST = 24.0
"""From here on, a sigmoid is 1 in float32, and that of the negative number as good as 0."""

_ROOT = (
    1.0, 9.999972397e-01, 5.000436017e-01, 1.664348058e-01, 4.226412223e-02, 7.459996472e-03,
    2.176777554e-03, -2.611932242e-04, 2.018985403e-04, -4.227333499e-05, 7.617454272e-06,
    -6.852503742e-07, 3.499017894e-08,
)  # fmt: skip
"""exp(v), from 0 to _MOST / 4, is nearly this polynomial in v: least squares of the relative error
over Chebyshev's points, which leaves 6e-8."""

_POWER = (
    1.0, 6.931472067e-01, 2.402265121e-01, 5.550327214e-02, 9.618025603e-03, 1.340043217e-03,
    1.546973198e-04,
)  # fmt: skip
"""2**f is nearly this polynomial in f, from -0.5 to 0.5: fitted in the same way, leaves 3e-9."""

_LOG2_E, _LEAST = 1.4426950408889634, -80.0
"""2**_LEAST is the weight of a key that a query does not see. It vanishes beside a weight of 1. It
is no smaller: where a block of a product has no other weights, sums would be subnormal, which
take Intel's processors many times as long."""

_ROUNDING = 1.5 * 2.0**23
"""Added to a float32 and subtracted again, it rounds to an integer."""

_MANTISSA, _BIAS = 2**23, 127
"""A float32 whose bits are those of the integer (n + _BIAS) * _MANTISSA is 2**n."""

_FEW_SCORES = 10_000
"""With fewer scores [B, H, N, T], MLX's own attention is faster: it launches fewer operations."""

_MOST_SCORES = 250_000
"""Scores that are held at once: they are written several times, so they should fit into a cache."""


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """Return silu(gate) * x, as mlx-lm's function of this name does, for arrays of one shape."""
    compute = _swiglu if gate.dtype == mx.float32 else activations.swiglu
    out: mx.array = compute(gate, x)
    return out


@partial(mx.compile, shapeless=True)
def _swiglu(gate: mx.array, x: mx.array) -> mx.array:
    squared = mx.square(_polynomial(_ROOT, mx.minimum(mx.abs(gate), _MOST) * 0.25))
    power = mx.square(squared)  # exp(abs(gate))
    above = mx.where(gate < 0, mx.where(gate < -_MOST, 0.0, 1.0), power)
    sigmoid = above / (1.0 + power)
    return gate * sigmoid * x


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: object,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Return what mlx-lm's `scaled_dot_product_attention` does.

    Shapes:
      queries: [B, H, N, D], keys: [B, K, T, D], values: [B, K, T, D'], where K divides H
      mask: broadcast to [B, H, N, T]; "causal": row n sees the first T - N + 1 + n keys
    Returns:
      [B, H, N, D']
    """
    B, H, N, _ = queries.shape
    T = keys.shape[2]
    known = mask is None or isinstance(mask, str) or mask.dtype == mx.bool_
    if B * H * N * T < _FEW_SCORES or not known or queries.dtype != mx.float32 or sinks is not None:
        out: mx.array = base.scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
        )
        return out
    if isinstance(mask, str):
        mask = mx.arange(T) <= mx.arange(T - N, T)[:, None]
    rows = max(1, _MOST_SCORES // (B * H * T))
    if mask is not None:
        mask = mx.broadcast_to(mask, (*mask.shape[:-2], N, T))
    parts: list[mx.array] = []
    for at in range(0, N, rows):
        part = queries[:, :, at : at + rows] * scale
        if parts:  # one after the other, and not all at once
            (part,) = mx.depends([part], [parts[-1]])
        seen = None if mask is None else mask[..., at : at + rows, :]
        parts.append(_attention(part, keys, values, seen))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def _attention(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None
) -> mx.array:
    """Return `attention` with scaled queries and a mask of booleans."""
    B, H, N, D = queries.shape
    K, T = keys.shape[1:3]
    grouped = (B, K, H // K * N)
    scores = queries.reshape(*grouped, D) @ keys.swapaxes(-1, -2)
    if mask is not None:
        least = mx.finfo(mx.float32).min
        scores = mx.where(mask, scores.reshape(B, H, N, T), least).reshape(*grouped, T)
    fraction, power = _parts_of_exp(scores, mx.max(scores, axis=-1, keepdims=True))
    weights = fraction * power.view(mx.float32)
    out = weights @ values / mx.sum(weights, axis=-1, keepdims=True)
    return out.reshape(B, H, N, values.shape[-1])


@partial(mx.compile, shapeless=True)
def _parts_of_exp(x: mx.array, most: mx.array) -> tuple[mx.array, mx.array]:
    """Return exp(x - most), for x <= most, as a number and the bits of a float32 to multiply by."""
    exponent = mx.maximum((x - most) * _LOG2_E, _LEAST)
    whole = (exponent + _ROUNDING) - _ROUNDING
    power = (whole.astype(mx.int32) + _BIAS) * _MANTISSA
    return _polynomial(_POWER, exponent - whole), power


def _polynomial(coefficients: tuple[float, ...], x: mx.array) -> mx.array:
    *others, value = (mx.array(c) for c in coefficients)
    for coefficient in reversed(others):
        value = value * x + coefficient
    return value


_OURS = {
    "swiglu": (activations.swiglu, swiglu),
    "scaled_dot_product_attention": (base.scaled_dot_product_attention, attention),
}
"""By the name under which mlx-lm's modules know a function: theirs, and ours."""


@lru_cache
def with_fast_functions(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a module that calls the functions here instead of mlx-lm's.

    A module that calls none of them is returned as it is.
    """
    call = kind.__call__
    if not isinstance(call, FunctionType):
        return kind
    ours = {
        name: mine
        for name, (theirs, mine) in _OURS.items()
        if name in call.__code__.co_names and call.__globals__.get(name) is theirs
    }
    if not ours:
        return kind
    known = {**call.__globals__, **ours}
    mine = FunctionType(call.__code__, known, call.__name__, call.__defaults__, call.__closure__)
    mine.__kwdefaults__ = call.__kwdefaults__
    return type(kind.__name__, (kind,), {"__call__": mine, "__module__": kind.__module__})
