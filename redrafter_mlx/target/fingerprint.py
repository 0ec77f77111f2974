"""A model's tensor shapes and sizes, on which its timing depends."""

from __future__ import annotations

import hashlib
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten


def shapes_hash(module: nn.Module) -> str:
    """16 hexadecimal digits of SHA-256 over the names, shapes and types of a module's tensors."""
    leaves = cast(list[tuple[str, mx.array]], tree_flatten(module.parameters()))
    lines = sorted(f"{name} {array.dtype} {array.shape}" for name, array in leaves)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def nbytes_of(module: nn.Module) -> int:
    """Return the bytes of a module's parameters, which a call with one query row reads once."""
    leaves = cast(list[tuple[str, mx.array]], tree_flatten(module.parameters()))
    return sum(array.nbytes for _, array in leaves)


def trainable_size(module: nn.Module) -> int:
    """Count a module's trainable parameters, without evaluating them."""
    leaves = cast(list[tuple[str, mx.array]], tree_flatten(module.trainable_parameters()))
    return sum(array.size for _, array in leaves)
