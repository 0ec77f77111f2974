"""Hashes of a model's tensors: of their shapes, on which its timing depends, or of values."""

from __future__ import annotations

import hashlib
from typing import cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

_SAMPLES = 4
"""Number of values of each tensor that are hashed."""


def shapes_hash(module: nn.Module) -> str:
    """16 hexadecimal digits of SHA-256 over the names, shapes and types of a module's tensors."""
    lines = sorted(f"{name} {array.dtype} {array.shape}" for name, array in _leaves(module))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def values_hash(*modules: nn.Module) -> str:
    """Return 16 hexadecimal digits of SHA-256 over some values of each tensor.

    It distinguishes models of one architecture, and takes a few milliseconds.
    """
    leaves = [leaf for module in modules for leaf in _leaves(module)]
    samples = [
        array.reshape(-1)[array.size // 2 :][:_SAMPLES].astype(mx.float32) for _, array in leaves
    ]
    mx.eval(samples)
    digest = hashlib.sha256()
    for (name, _), sample in sorted(zip(leaves, samples, strict=True), key=lambda pair: pair[0][0]):
        digest.update(name.encode())
        digest.update(np.array(sample).tobytes())
    return digest.hexdigest()[:16]


def nbytes_of(module: nn.Module) -> int:
    """Return the bytes of a module's parameters, which a call with one query row reads once."""
    return sum(array.nbytes for _, array in _leaves(module))


def trainable_size(module: nn.Module) -> int:
    """Count a module's trainable parameters, without evaluating them."""
    leaves = cast(list[tuple[str, mx.array]], tree_flatten(module.trainable_parameters()))
    return sum(array.size for _, array in leaves)


def _leaves(module: nn.Module) -> list[tuple[str, mx.array]]:
    return cast(list[tuple[str, mx.array]], tree_flatten(module.parameters()))
