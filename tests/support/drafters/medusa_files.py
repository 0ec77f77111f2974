"""Medusa heads in their published layouts, and their formula."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from joint import small_buffers as small_buffers
from references import silu
from tiny import HIDDEN, VOCAB

HEADS = 3


def authors_tensors(
    layers: int = 1, D: int = HIDDEN, V: int = VOCAB, seed: int = 0
) -> dict[str, mx.array]:
    """Return random heads under the authors' names."""
    rng = np.random.default_rng(seed)

    def drawn(*shape: int) -> mx.array:
        return mx.array(rng.normal(size=shape).astype(np.float32) / np.sqrt(D))

    tensors = {}
    for k in range(HEADS):
        for layer in range(layers):
            tensors[f"{k}.{layer}.linear.weight"] = drawn(D, D)
            tensors[f"{k}.{layer}.linear.bias"] = drawn(D)
        tensors[f"{k}.{layers}.weight"] = 4 * drawn(V, D)
    return tensors


def expected(
    tensors: dict[str, mx.array], hidden: np.ndarray, k: int, head: mx.array | None = None
) -> np.ndarray:
    """Return the logits of head k, by the formula: h <- h + silu(W h + b), L h."""
    w = {name: np.array(array) for name, array in tensors.items()}
    layer = 0
    while f"{k}.{layer}.linear.weight" in w:
        bias = w.get(f"{k}.{layer}.linear.bias", 0.0)
        hidden = hidden + silu(hidden @ w[f"{k}.{layer}.linear.weight"].T + bias)
        layer += 1
    return hidden @ (w[f"{k}.{layer}.weight"] if head is None else np.array(head)).T


AUTHORS = {
    "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    "medusa_num_heads": 2,
    "medusa_num_layers": 1,
}
