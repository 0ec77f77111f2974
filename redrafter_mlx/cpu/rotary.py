"""Rotary embeddings that share cosines and sines.

MLX's CPU backend recomputes the cosines and sines of all positions in every layer, once for queries
and once for keys, one number at a time. Here they are computed once per call, by the model's own
rotary embedding, and applied in the same arithmetic: the results are bit-identical.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import NamedTuple, ParamSpec, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.rope_utils import Llama3RoPE

_P = ParamSpec("_P")
_R = TypeVar("_R")

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
