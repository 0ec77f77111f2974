"""Rotary embeddings that take one position per node."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import mlx.core as mx
import mlx.nn as nn

from redrafter_mlx.cpu.door import SharedRotations

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Rotations:
    """The rotary embeddings of one network.

    count:  number of rotary embeddings
    others: type names of embeddings that take no node positions
    """

    def __init__(self) -> None:
        self.count = 0
        self.others: set[str] = set()
        self._shared = SharedRotations()

    def wrap(self, rope: nn.Module) -> Callable[[mx.array, int | mx.array], mx.array]:
        """Wrap a rotary embedding so that it takes node positions."""
        self.count += 1
        return self._shared.rope(rope, NodeRope(rope))

    def sharing(self, call: Callable[_P, _R]) -> Callable[_P, _R]:
        """Return a call of the network, in which all embeddings are given the same positions."""
        return self._shared.sharing(call)


class NodeRope:
    """A rotary embedding that also takes one position per node: offset [B, N]."""

    def __init__(self, rope: nn.Module) -> None:
        self._rope = rope

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Rotate x [B, H, N, size].

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
