"""Random assistants for tiny Gemma 4 models, in their published layout, and their equations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache
from tiny import BOTH, HIDDEN, WINDOW, byte_tokenizer, sliding_model

from redrafter_mlx.drafting.files.forms import DrafterFolder
from redrafter_mlx.drafting.published.heads.assistant import AssistantDrafter
from redrafter_mlx.target_model.model import Target

Tensors = dict[str, mx.array]

VOCAB, SIZE, INNER, HEADS = 258, 24, 40, 4
KINDS = [*BOTH[:1] * 2, *BOTH]
HEAD_SIZES = dict(zip(BOTH, (8, 16), strict=True))
ROPE: dict[str, dict[str, object]] = {
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    "full_attention": {
        "rope_theta": 1000000.0, "rope_type": "proportional", "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
CENTROIDS, CHOSEN = 86, 10
CANDIDATES = VOCAB // CENTROIDS * CHOSEN

SMALL, LARGE = "shares keys between layers", "has one projection for keys and values"


def gemma(kind: str = SMALL, vocab: int = VOCAB) -> nn.Module:
    """Return a model that is arranged as E2B and E4B are, or as 26B-A4B and 31B are."""
    given: dict[str, object] = {"vocab_size": vocab, "vocab_size_per_layer_input": vocab}
    if kind == LARGE:
        given |= {
            "num_kv_shared_layers": 0, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
        }  # fmt: skip
    return sliding_model("gemma4_text", **given)


def random_assistant(
    centroids: bool = True, vocab: int = VOCAB, size: int = SIZE, seed: int = 0
) -> Tensors:
    """Return the tensors of an assistant of four layers."""
    rng = np.random.default_rng(seed)

    def matrix(*shape: int) -> mx.array:
        return mx.array(rng.normal(0, 0.3, shape).astype(np.float32))

    def norm(n: int) -> mx.array:
        return mx.array(rng.normal(1, 0.1, n).astype(np.float32))

    tensors = {
        "model.embed_tokens.weight": 3 * matrix(vocab, size),
        "model.norm.weight": norm(size),
        "pre_projection.weight": matrix(size, 2 * HIDDEN),
        "post_projection.weight": matrix(HIDDEN, size),
    }
    for i, kind in enumerate(KINDS):
        n = HEAD_SIZES[kind]
        own = {
            "self_attn.q_proj.weight": matrix(HEADS * n, size),
            "self_attn.o_proj.weight": matrix(size, HEADS * n),
            "self_attn.q_norm.weight": norm(n),
            **{f"mlp.{name}_proj.weight": matrix(INNER, size) for name in ("gate", "up")},
            "mlp.down_proj.weight": matrix(size, INNER),
            "layer_scalar": norm(1),
        }
        for name in (
            "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ):  # fmt: skip
            own[f"{name}.weight"] = norm(size)
        tensors |= {f"model.layers.{i}.{name}": array for name, array in own.items()}
    if centroids:
        tensors["masked_embedding.centroids.weight"] = matrix(CENTROIDS, size)
        order = rng.permutation(vocab).astype(np.int64)
        tensors["masked_embedding.token_ordering"] = mx.array(order)
    return tensors


def config_of(tensors: Mapping[str, mx.array], **changes: object) -> dict[str, object]:
    """Return a configuration in the form of transformers; `changes` are of `text_config`."""
    vocab, size = tensors["model.embed_tokens.weight"].shape
    text = {
        "model_type": "gemma4_text", "hidden_size": size, "num_hidden_layers": len(KINDS),
        "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": 2,
        "head_dim": 8, "global_head_dim": 16, "layer_types": KINDS, "rms_norm_eps": 1e-5,
        "sliding_window": WINDOW, "rope_parameters": ROPE, "vocab_size": vocab,
        "num_kv_shared_layers": len(KINDS), "hidden_size_per_layer_input": 0, **changes,
    }  # fmt: skip
    return {
        "model_type": "gemma4_assistant", "backbone_hidden_size": HIDDEN, "text_config": text,
        "use_ordered_embeddings": "masked_embedding.centroids.weight" in tensors,
        "num_centroids": CENTROIDS, "centroid_intermediate_top_k": CHOSEN,
        "tie_word_embeddings": True,
    }  # fmt: skip


def write_assistant(folder: Path, tensors: Tensors, **changes: object) -> Path:
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    (folder / "config.json").write_text(json.dumps(config_of(tensors, **changes)))
    return folder


def load(folder: Path, target: Target) -> AssistantDrafter:
    drafter = DrafterFolder(folder).bind(target, byte_tokenizer())
    assert isinstance(drafter, AssistantDrafter)
    return drafter


def by_mlx_lm(model: nn.Module, text: Sequence[int]) -> tuple[np.ndarray, list[Any]]:
    """Return the final norm's output [P, D], and keys and values [K, P, size] of each cache."""
    caches = [KVCache() for _ in model.make_cache()]
    hidden = model.model(mx.array([[*text]]), cache=caches)
    held = [
        [np.array(a[0, :, : len(text)], np.float64) for a in (c.keys, c.values)] for c in caches
    ]
    return np.array(hidden[0], np.float64), held


class Equations:
    """An assistant's logits after a text, in NumPy and float64, one draft at a time."""

    def __init__(self, model: nn.Module, tensors: Mapping[str, mx.array], ahead: int = 0) -> None:
        """`ahead`: how far the rows' position is from the last committed one."""
        self._model, self._ahead = model, ahead
        self._w = {
            name.removeprefix("model."): np.array(array, np.float64)
            for name, array in tensors.items()
        }
        self._embedding = np.array(model.model.embed_tokens.weight, np.float64)

    def logits(self, text: Sequence[int], root: int, drafts: Sequence[int]) -> np.ndarray:
        """Return [1 + drafts, V]: after the root, and after each of the drafts that follow it."""
        hidden, caches = by_mlx_lm(self._model, text)
        kinds = self._model.args.layer_types[: len(caches)]
        last = {kind: caches[i] for i, kind in enumerate(kinds)}
        context, found = hidden[-1], []
        for token in (root, *drafts):
            scaled = self._embedding[token] * HIDDEN**0.5
            x = self._w["pre_projection.weight"] @ np.concatenate([scaled, context])
            for i, kind in enumerate(KINDS):
                x = self._layer(x, i, kind, *last[kind])
            x = self._norm(x, "norm.weight")
            context = self._w["post_projection.weight"] @ x
            found.append(self._scores(x))
        return np.array(found)

    def _layer(
        self, x: np.ndarray, i: int, kind: str, keys: np.ndarray, values: np.ndarray
    ) -> np.ndarray:
        w = {
            name.removeprefix(f"layers.{i}."): array
            for name, array in self._w.items()
            if name.startswith(f"layers.{i}.")
        }

        def normed(y: np.ndarray, name: str) -> np.ndarray:
            return self._norm(y, f"layers.{i}.{name}.weight")

        P, size = keys.shape[1:]
        queries = (w["self_attn.q_proj.weight"] @ normed(x, "input_layernorm")).reshape(-1, size)
        queries = normed(queries, "self_attn.q_norm")
        queries = _rotated(queries, P - 1 + self._ahead, ROPE[kind])
        seen = range(max(0, P - WINDOW) if kind == "sliding_attention" else 0, P)
        read = []
        for head, query in enumerate(queries):
            k, v = keys[head * len(keys) // HEADS], values[head * len(keys) // HEADS]
            weights = np.exp([query @ k[p] for p in seen])
            read.append(weights @ v[[*seen]] / weights.sum())
        out = w["self_attn.o_proj.weight"] @ np.concatenate(read)
        x = x + normed(out, "post_attention_layernorm")
        y = normed(x, "pre_feedforward_layernorm")
        gate, up = (w[f"mlp.{name}_proj.weight"] @ y for name in ("gate", "up"))
        inner = gate / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
        out = w["mlp.down_proj.weight"] @ (inner * up)
        total: np.ndarray = (x + normed(out, "post_feedforward_layernorm")) * w["layer_scalar"]
        return total

    def _scores(self, x: np.ndarray) -> np.ndarray:
        scores: np.ndarray = self._w["embed_tokens.weight"] @ x
        if "masked_embedding.centroids.weight" in self._w:
            best = np.argsort(self._w["masked_embedding.centroids.weight"] @ x)[-CHOSEN:]
            order = self._w["masked_embedding.token_ordering"].astype(int).reshape(CENTROIDS, -1)
            left_out = np.setdiff1d(np.arange(len(scores)), order[best])
            scores[left_out] = -np.inf
        return scores

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * self._w[name]


def _rotated(x: np.ndarray, position: int, rope: Mapping[str, Any]) -> np.ndarray:
    """Rotate the first part of each half of x [heads, size]; of a whole head if all rotates."""
    size = x.shape[-1]
    rotated = int(size * rope.get("partial_rotary_factor", 1))
    angles = np.zeros(size // 2)
    angles[: rotated // 2] = position * rope["rope_theta"] ** (-np.arange(0, rotated, 2) / size)
    first, second = x[:, : size // 2], x[:, size // 2 :]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
