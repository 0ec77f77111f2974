"""Rotary embeddings that take one position per node, and share cosines and sines on a CPU.

MLX's GPU kernel rotates a vector in one operation. Its CPU backend recomputes the cosines and sines
of all positions in every layer, once for queries and once for keys, one number at a time. Here they
are computed once per call, by the model's own rotary embedding, and applied in the same arithmetic:
the results are bit-identical.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, ParamSpec, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import Llama3RoPE

from redrafter_mlx.runtime.device import backend
from redrafter_mlx.speculation.constants import iota

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _CosSin(NamedTuple):
    """Cosines and sines that rotate the vectors of one call.

    Shapes, for rotated pairs of neighbours; for halves, the last two axes are swapped:
      cos: [B or 1, 1, N, dims / 2, 1]
      sin: [B or 1, 1, N, dims / 2, 2], the factor of the pair's other number: -sin, then sin

    offset: the offset that they were computed for
    """

    offset: int | mx.array
    cos: mx.array
    sin: mx.array


class _Calls(threading.local):
    """What the current call of a thread shares; None if no call shares anything."""

    cos_sins: dict[Hashable, _CosSin] | None = None


class Rotations:
    """The rotary embeddings of one network.

    count:  number of rotary embeddings
    others: type names of embeddings that take no node positions
    """

    def __init__(self) -> None:
        self.count = 0
        self.others: set[str] = set()
        self._calls = _Calls()  # two engines may share a draft model

    def wrap(self, rope: nn.Module) -> NodeRope:
        """Wrap a rotary embedding so that it takes node positions."""
        self.count += 1
        return NodeRope(rope, self)

    def sharing(self, call: Callable[_P, _R]) -> Callable[_P, _R]:
        """Return a call of the network in which equal embeddings share cosines and sines.

        All of them must be given the same positions.
        """

        def shared(*given: _P.args, **named: _P.kwargs) -> _R:
            with self._shared():
                return call(*given, **named)

        return shared if backend() == "cpu" else call

    @contextmanager
    def _shared(self) -> Iterator[None]:
        self._calls.cos_sins = {}
        try:
            yield
        finally:
            self._calls.cos_sins = None

    def rotate(self, rope: NodeRope, x: mx.array, offset: int | mx.array) -> mx.array | None:
        """Rotate x [B, H, N, size]; return None if nothing is shared."""
        cos_sins = self._calls.cos_sins
        if cos_sins is None or rope.key is None:
            return None
        key = rope.key, x.dtype, x.shape[2], offset if isinstance(offset, int) else id(offset)
        cos_sin = cos_sins.get(key)
        if cos_sin is None:
            cos_sin = cos_sins[key] = _cos_sin_of(rope, x, offset)
        return _rotated(x, cos_sin, rope.dims, rope.traditional)


class NodeRope:
    """A rotary embedding that also takes one position per node: offset [B, N].

    key: equal for embeddings that rotate alike; None if the embedding does more than rotate
    """

    def __init__(self, rope: nn.Module, rotations: Rotations) -> None:
        self._rope, self._rotations = rope, rotations
        self.key: Hashable = None
        self.dims, self.traditional = 0, False
        if type(rope) in (nn.RoPE, Llama3RoPE):
            self.dims, self.traditional = rope.dims, rope.traditional
            how = (rope.base, rope.scale) if type(rope) is nn.RoPE else _numbers(rope._freqs)
            self.key = type(rope), self.dims, self.traditional, how

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        rotated = self._rotations.rotate(self, x, offset)
        return self.rotate_alone(x, offset) if rotated is None else rotated

    def rotate_alone(self, x: mx.array, offset: int | mx.array) -> mx.array:
        """Rotate x [B, H, N, size] with the model's own embedding.

        MLX's embedding takes one position per batch row, so nodes of different depth are folded
        into the batch axis.
        """
        if not isinstance(offset, mx.array) or offset.ndim < 2:
            plain: mx.array = self._rope(x, offset=offset)
            return plain
        B, H, N, size = x.shape
        folded = x.swapaxes(1, 2).reshape(B * N, H, 1, size)
        rotated: mx.array = self._rope(folded, offset=offset.reshape(-1))
        return rotated.reshape(B, N, H, size).swapaxes(1, 2)


def _cos_sin_of(rope: NodeRope, x: mx.array, offset: int | mx.array) -> _CosSin:
    """Return cosines and sines for x [B, H, N, size]: the embedding of the vector (1, 0)."""
    rows = offset.shape[0] if isinstance(offset, mx.array) and offset.ndim else 1
    index = iota(rope.dims)
    first = index % 2 == 0 if rope.traditional else index < rope.dims // 2
    unit = mx.broadcast_to(first.astype(x.dtype), (rows, 1, x.shape[2], rope.dims))
    pairs, axis = _pairs(rope.rotate_alone(unit, offset), rope.traditional)
    cos, sin = mx.split(pairs, 2, axis)
    signs = mx.array([-1, 1] if axis == -1 else [[-1], [1]], x.dtype)
    return _CosSin(offset, cos, sin * signs)


def _rotated(x: mx.array, cos_sin: _CosSin, dims: int, traditional: bool) -> mx.array:
    """Rotate the first `dims` of x [B, H, N, size], in the same arithmetic as MLX.

    The fewer operations, the less the host works, which shares the cores of a CPU.
    """
    whole = dims == x.shape[-1]
    pairs, axis = _pairs(x if whole else x[..., :dims], traditional)
    swapped = pairs[..., ::-1] if axis == -1 else pairs[..., ::-1, :]  # two numbers, in turn
    rotated = mx.flatten(pairs * cos_sin.cos + swapped * cos_sin.sin, -2)
    return rotated if whole else mx.concatenate([rotated, x[..., dims:]], axis=-1)


def _pairs(x: mx.array, traditional: bool) -> tuple[mx.array, int]:
    """Split the last axis into two; return the one along which a pair's two numbers lie.

    They are neighbours, or one is from each half.
    """
    half = x.shape[-1] // 2
    if traditional:
        return mx.unflatten(x, -1, (half, 2)), -1
    return mx.unflatten(x, -1, (2, half)), -2


def _numbers(x: mx.array) -> tuple[float, ...]:
    numbers: list[float] = x.tolist()  # type: ignore[assignment]
    return tuple(numbers)
