"""Attention, SwiGLU and rotary embeddings that a CPU computes in less time than MLX's own.

MLX takes some 20 ns there for each exponential function. mlx-lm's modules call two functions that
do: `scaled_dot_product_attention` and `swiglu`. Those here compute the same, to rounding in
float32, by polynomials, of which a C++ compiler makes vector instructions. A copy of a module, of a
class with the same code, calls them instead.

And it recomputes the cosines and sines of all positions in every layer, once for queries and once
for keys, one number at a time. Here they are computed once per call, by the model's own rotary
embedding, and applied in the same arithmetic: the results are bit-identical.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from functools import lru_cache, partial
from types import FunctionType
from typing import NamedTuple, ParamSpec, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import activations, base
from mlx_lm.models.rope_utils import Llama3RoPE

_P = ParamSpec("_P")
_R = TypeVar("_R")

_POWER = (
    1.0, 6.931472067e-01, 2.402265121e-01, 5.550327214e-02, 9.618025603e-03, 1.340043217e-03,
    1.546973198e-04,
)  # fmt: skip
"""2**f is nearly this polynomial in f, from -0.5 to 0.5: fitted in the same way, leaves 3e-9."""

_LOG2_E, _LOW, _HIGH = 1.4426950408889634, -80.0, 128.0
"""2**_LOW is the weight of a key that a query does not see. It vanishes beside a weight of 1. It
is no smaller: where a block of a product has no other weights, sums would be subnormal, which
take Intel's processors many times as long. 2**_HIGH is infinite, as the exponential function is."""

_ROUNDING = 1.5 * 2.0**23
"""Added to a float32 and subtracted again, it rounds to an integer."""

_MANTISSA, _BIAS = 2.0**23, 127.0
"""A float32 whose bits are those of the integer (n + _BIAS) * _MANTISSA is 2**n."""

KEPT = 64
"""Shapes for which functions stay compiled. MLX would keep all, and functions that it compiles for
any shape broadcast every number to the whole array."""

FEW_SCORES = 2_500
"""With fewer scores [B, H, N, T], MLX's own attention is faster: it launches fewer operations."""

_MAX_SCORES = 250_000
"""Scores that are held at once: they are written several times, so they should fit into a cache."""

_MIN_ROWS = 24
"""Minimum number of query rows at once, as each such part reads all keys. With three at once, a
chunk of 512 took twice as long after 8,192 tokens."""


@mx.custom_function
def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """Return silu(gate) * x, as mlx-lm's function of this name does, for arrays of one shape."""
    if gate.dtype != mx.float32:
        return cast("mx.array", activations.swiglu(gate, x))
    exp, gated = compiled(gate.shape)
    fraction, power = exp(gate, -1.0)
    return gated(gate, x, fraction, power.view(mx.float32))


@swiglu.vjp
def _gradients(
    given: tuple[mx.array, mx.array], cotangent: mx.array, _output: mx.array
) -> tuple[mx.array, ...]:
    """Return the gradients of mlx-lm's function: MLX has none of the bits of a number."""
    _, gradients = mx.vjp(activations.swiglu, [*given], [cotangent])
    return tuple(gradients)


def gated(gate: mx.array, x: mx.array, fraction: mx.array, power: mx.array) -> mx.array:
    return gate / (1.0 + fraction * power) * x


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
    if isinstance(keys, tuple):  # quantised, see target_model/cache/packed_cache.py
        quantised: mx.array = base.scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
        )
        return quantised
    T = keys.shape[2]
    known = mask is None or isinstance(mask, str) or mask.dtype == mx.bool_
    if B * H * N * T < FEW_SCORES or not known or queries.dtype != mx.float32 or sinks is not None:
        out: mx.array = base.scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
        )
        return out
    if isinstance(mask, str):
        mask = mx.arange(T) <= mx.arange(T - N, T)[:, None]
    rows = max(_MIN_ROWS, _MAX_SCORES // (B * H * T))
    bias = None
    if mask is not None:  # added to the scores: a choice for each of them takes six times as long
        bias = mx.where(mask, 0.0, mx.finfo(mx.float32).min)
        bias = mx.broadcast_to(bias, (*mask.shape[:-2], N, T))
    parts: list[mx.array] = []
    for at in range(0, N, rows):
        part = queries[:, :, at : at + rows]
        if parts:  # one after the other, and not all at once
            (part,) = mx.depends([part], [parts[-1]])
        of_part = None if bias is None else bias[..., at : at + rows, :]
        parts.append(_attention(part, keys, values, scale, of_part))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def _attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, bias: mx.array | None
) -> mx.array:
    """Return `attention` with a mask that is added to the scores."""
    B, H, N, D = queries.shape
    K, T = keys.shape[1:3]
    grouped = (B, K, H // K * N)
    scores = queries.reshape(*grouped, D) @ keys.swapaxes(-1, -2)
    if bias is not None:
        scores = (scores.reshape(B, H, N, T) + bias).reshape(*grouped, T)
    scores = scores - mx.max(scores, axis=-1, keepdims=True)
    fraction, power = compiled(scores.shape).parts_of_exp(scores, scale)
    weights = fraction * power.view(mx.float32)
    out = weights @ values / mx.sum(weights, axis=-1, keepdims=True)
    return out.reshape(B, H, N, values.shape[-1])


def parts_of_exp(x: mx.array, factor: float) -> tuple[mx.array, mx.array]:
    """Return exp(x * factor), from 2**_LOW on, as a number and the bits of a float32 to multiply.

    MLX compiles one loop of operations that depend on each other in up to eleven levels, so the
    polynomial is not computed by Horner's method, which would take twelve.
    """
    exponent = mx.clip(x * (factor * _LOG2_E), _LOW, _HIGH)
    whole = (exponent + _ROUNDING) - _ROUNDING
    f = exponent - whole
    squared, cubed = f * f, f * f * f
    c0, c1, c2, c3, c4, c5, c6 = _POWER
    higher = (c3 + c4 * f) + (c5 * squared + c6 * cubed)
    fraction = (c0 + c1 * f + c2 * squared) + cubed * higher
    return fraction, ((whole + _BIAS) * _MANTISSA).astype(mx.int32)


class _Compiled(NamedTuple):
    """Functions that are compiled for arrays of one shape."""

    parts_of_exp: Callable[[mx.array, float], tuple[mx.array, mx.array]]
    gated: Callable[[mx.array, mx.array, mx.array, mx.array], mx.array]


@lru_cache(KEPT)
def compiled(shape: tuple[int, ...]) -> _Compiled:  # noqa: ARG001
    # With one object for all shapes, dropping one shape would drop the graphs of all.
    return _Compiled(mx.compile(partial(parts_of_exp)), mx.compile(partial(gated)))


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


Rope = Callable[[mx.array, "int | mx.array"], mx.array]
"""Rotates x [B, H, N, size] by an offset: an int, [B] int32, or one for each node [B, N]."""


class _CosSin(NamedTuple):
    """Cosines and sines that rotate the vectors of one call.

    Shapes, for rotated pairs of neighbours; for halves, the last two axes are swapped:
      cos: [B or 1, 1, N, dims / 2, 1]
      sin: [B or 1, 1, N, dims / 2, 2], the factor of the pair's other number: -sin, then sin

    offset: the offset that they were computed for
    """

    cos: mx.array
    sin: mx.array
    offset: int | mx.array


class CosSins(threading.local):
    """What the current call of a network shares in each thread; None if no call shares anything.

    (Two engines may share a draft model.)
    """

    of_call: dict[Hashable, _CosSin] | None = None

    def sharing(self, call: Callable[_P, _R]) -> Callable[_P, _R]:
        """Return a call of the network whose embeddings share cosines and sines."""

        def shared(*given: _P.args, **named: _P.kwargs) -> _R:
            self.of_call = {}
            try:
                return call(*given, **named)
            finally:
                self.of_call = None

        return shared


def only_rotates(rope: nn.Module) -> bool:
    """Whether an embedding is known to do nothing else than rotate."""
    return type(rope) in (nn.RoPE, Llama3RoPE)


class SharingRope:
    """A rotary embedding with shared cosines and sines."""

    def __init__(self, rope: nn.Module, rotate: Rope, cos_sins: CosSins) -> None:
        """`rotate` applies `rope`, for which `only_rotates` is true."""
        self._rotate, self._cos_sins = rotate, cos_sins
        self._dims, self._neighbours = rope.dims, rope.traditional
        how = (rope.base, rope.scale) if type(rope) is nn.RoPE else tuple(rope._freqs.tolist())
        self._key = type(rope), self._dims, self._neighbours, how  # equal if they rotate alike
        half = self._dims // 2
        self._pairs = (half, 2) if self._neighbours else (2, half)
        of_pair = [1, 0] if self._neighbours else [[1], [0]]
        self._unit = mx.array(np.broadcast_to(of_pair, self._pairs).astype(np.float32).reshape(-1))

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Rotate the first vectors of x [B, H, N, size], in the same arithmetic as MLX.

        The fewer operations, the less the host works, which shares the cores of a CPU.
        """
        shared = self._cos_sins.of_call
        if shared is None:
            return self._rotate(x, offset)
        key = self._key, x.dtype, x.shape[2], offset if isinstance(offset, int) else id(offset)
        cos_sin = shared.get(key)
        if cos_sin is None:
            cos_sin = shared[key] = self._cos_sin(x, offset)
        whole = self._dims == x.shape[-1]
        pairs = mx.unflatten(x if whole else x[..., : self._dims], -1, self._pairs)
        swapped = pairs[..., ::-1] if self._neighbours else pairs[..., ::-1, :]
        rotated = mx.flatten(pairs * cos_sin.cos + swapped * cos_sin.sin, -2)
        return rotated if whole else mx.concatenate([rotated, x[..., self._dims :]], axis=-1)

    def _cos_sin(self, x: mx.array, offset: int | mx.array) -> _CosSin:
        """Return cosines and sines for x: the embedding of the vector (1, 0)."""
        rows = offset.shape[0] if isinstance(offset, mx.array) and offset.ndim else 1
        unit = mx.broadcast_to(self._unit.astype(x.dtype), (rows, 1, x.shape[2], self._dims))
        pairs = mx.unflatten(self._rotate(unit, offset), -1, self._pairs)
        cos, sin = mx.split(pairs, 2, -1 if self._neighbours else -2)
        signs = mx.array([-1, 1] if self._neighbours else [[-1], [1]], x.dtype)
        return _CosSin(cos, sin * signs, offset)
