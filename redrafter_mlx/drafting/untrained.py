"""An untrained baseline for any network, with the same form and cost."""

from __future__ import annotations

import copy
from typing import TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

_N = TypeVar("_N", bound=nn.Module)


def shuffled(network: _N) -> _N:
    """Return a copy whose parameters, quantised ones too, have their rows in a random order."""
    mixed = copy.deepcopy(network)
    key = mx.random.key(0)
    mixed.update(tree_map(lambda a: mx.random.permutation(a, key=key), network.parameters()))
    return mixed
