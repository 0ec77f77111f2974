"""MLP speculators in their published layout, and their formula."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
from tiny import HIDDEN, VOCAB

HEADS, INNER = 3, 24


def stored_tensors(
    D: int = INNER, V: int = VOCAB, H: int = HIDDEN, tied: bool = False
) -> dict[str, mx.array]:
    """Return a random speculator as fms-extras stores it; tied weights have each head's name."""
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> mx.array:
        return mx.array(rng.normal(size=shape).astype(np.float32) / np.sqrt(D))

    tensors: dict[str, mx.array] = {}
    for i in range(HEADS):
        tensors[f"emb.{i}.weight"] = drawn(V, D)
        tensors[f"proj.{i}.weight"] = drawn(D, D if i else H)
        tensors[f"head.{i}.weight"] = 4 * drawn(V, D)
        tensors[f"ln.{i}.weight"], tensors[f"ln.{i}.bias"] = 1 + drawn(D), drawn(D)
        if tied:
            for name in [f"{kind}.weight" for kind in ("emb", "head", "ln")] + ["ln.bias"]:
                kind, rest = name.split(".")
                tensors[f"{kind}.{i}.{rest}"] = tensors[f"{kind}.0.{rest}"]
            tensors[f"proj.{i}.weight"] = tensors[f"proj.{min(i, 1)}.weight"]
    return tensors


def config_of(**changes: object) -> dict[str, object]:
    return {
        "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator",
        "vocab_size": VOCAB, "emb_dim": HIDDEN, "inner_dim": INNER, "n_predict": HEADS,
        "top_k_tokens_per_head": [5, 4, 3], "n_candidates": 5, "tie_weights": False,
        "scale_input": False, "torch_dtype": "float16", **changes,
    }  # fmt: skip


def rms(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def expected(
    tensors: dict[str, mx.array], hidden: np.ndarray, path: list[int], scale_input: bool, D: int
) -> np.ndarray:
    """Return the logits after a path of tokens, the root first, by the formula of fms-extras."""
    w = {name: np.array(array) for name, array in tensors.items()}
    sw = 0.5 ** (0.5 / HEADS)
    ew = math.sqrt((1 - sw**2) * D / 2)
    state = rms(hidden) / math.sqrt(2) if scale_input else hidden
    for i, token in enumerate(path):
        z = w[f"proj.{i}.weight"] @ state + ew / sw * w[f"emb.{i}.weight"][token]
        state = gelu(w[f"ln.{i}.weight"] * rms(z) + w[f"ln.{i}.bias"])
    return w[f"head.{len(path) - 1}.weight"] @ state
