"""SwiGLU on a CPU, where MLX takes some 20 ns for each exponential function.

A rational function takes a sixth of that, since a C++ compiler makes vector instructions of it. Its
error is that of rounding in float32.
"""

from __future__ import annotations

from functools import lru_cache, partial
from types import FunctionType

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations

_MOST = 9.0
"""From here on, tanh is 1 in float32."""

_ABOVE = (9.999998963e-01, 1.336954227e-01, 3.482310522e-03, 2.040452255e-05, 1.309693796e-08)
_BELOW = (1.0, 4.670283569e-01, 2.582554628e-02, 3.264526242e-04, 7.665654200e-07)
"""tanh(z) / z is nearly a quotient of these polynomials in z * z: least squares over Chebyshev's
points up to `_MOST`, which leaves 2e-8."""


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """Return silu(gate) * x, as mlx-lm's function of this name does, for arrays of one shape."""
    if gate.dtype != mx.float32:
        theirs: mx.array = activations.swiglu(gate, x)
        return theirs
    ours: mx.array = _swiglu(gate, x)
    return ours


@partial(mx.compile, shapeless=True)
def _swiglu(gate: mx.array, x: mx.array) -> mx.array:
    z = mx.minimum(mx.maximum(0.5 * gate, -_MOST), _MOST)
    tanh = z * _polynomial(_ABOVE, z * z) / _polynomial(_BELOW, z * z)
    sigmoid = mx.where(gate < -2 * _MOST, 0.0, 0.5 + 0.5 * tanh)
    return gate * sigmoid * x


def _polynomial(coefficients: tuple[float, ...], x: mx.array) -> mx.array:
    *others, value = (mx.array(c) for c in coefficients)
    for coefficient in reversed(others):
        value = value * x + coefficient
    return value


@lru_cache
def with_fast_swiglu(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a module that calls `swiglu` here where `kind` calls mlx-lm's.

    A module that does not is returned as it is.
    """
    call = kind.__call__
    if not isinstance(call, FunctionType) or "swiglu" not in call.__code__.co_names:
        return kind
    if call.__globals__.get("swiglu") is not activations.swiglu:
        return kind
    known = {**call.__globals__, "swiglu": swiglu}
    ours = FunctionType(call.__code__, known, call.__name__, call.__defaults__, call.__closure__)
    ours.__kwdefaults__ = call.__kwdefaults__
    return type(kind.__name__, (kind,), {"__call__": ours, "__module__": kind.__module__})
