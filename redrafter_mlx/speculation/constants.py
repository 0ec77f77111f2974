"""Constant arrays that every step uses, made once: each `mx.arange` is a kernel launch on a GPU."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import numpy as np


@lru_cache(maxsize=256)
def iota(size: int) -> mx.array:
    """Return 0, 1, ... size - 1 as int32. The array has no graph, so that any thread may use it."""
    return mx.array(np.arange(size, dtype=np.int32))


@lru_cache(maxsize=256)
def is_root(nodes: int) -> mx.array:
    """Return whether each node of a tree is its root, the first one, as bool; see `iota`."""
    return mx.array(np.arange(nodes) == 0)
