"""Linear layers with fewer nodes in their graph, which the host builds anew for every call.

`nn.Linear` transposes its weight in every call, and MLX folds the leading axes of [B, N, D] into
one and unfolds them after the product: four nodes, of which one computes. Here the transposed
weight is made once, with a batch axis for a single sequence, so that only the product is left. It
is the same product of the same numbers: the results are bit-identical.
"""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx
import mlx.nn as nn


class LinearView(nn.Linear):
    """A linear layer on the weight and bias of another one; see `prepare`."""

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)  # not nn.Linear's, which draws numbers
        for name in ("weight", "bias"):
            if name in layer:
                self[name] = layer[name]
        self._prepared: mx.array | None = None  # the weight that the others are views of
        self._for_batches: mx.array | None = None  # [D, E]
        self._for_one: mx.array | None = None  # [1, D, E]

    def __call__(self, x: mx.array) -> mx.array:
        one = x.ndim == 3 and x.shape[0] == 1
        weight = self._for_one if one else self._for_batches
        if weight is None or self._prepared is not self.weight:
            layer: mx.array = super().__call__(x)
            return layer
        return mx.addmm(self.bias, x, weight) if "bias" in self else x @ weight


def prepare(layers: Iterable[LinearView]) -> None:
    """Make the layers' views of their weights, which are brought into memory for that."""
    for layer in layers:
        layer._prepared = layer.weight
        layer._for_batches = layer.weight.T
        layer._for_one = layer._for_batches[None]
        mx.async_eval(layer._for_batches, layer._for_one)
