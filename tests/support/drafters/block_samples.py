"""Random block drafters in their published layouts, and their equations in NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from eagle_samples import HEADS, INNER, KV_HEADS, LAYERS, VOCAB, Tensors, write_folder
from tiny import HIDDEN

from redrafter_mlx.drafting.files.forms import DrafterFolder
from redrafter_mlx.drafting.published.blocks.dflash import BlockDrafter
from redrafter_mlx.target_model.model import Target

BASE = 10000.0
MASK, RANK = 250, 12
"""The mask token, and the rank of DSpark's correction."""


@dataclass(frozen=True)
class Sample:
    """A drafter to write.

    config:    keys of config.json in addition to the sizes
    prefix:    of all tensors
    nested:    as in speculators' files, where the layers' keys have a section of their own
    features:  number of the target's layers that it reads
    rows:      of a block
    first_row: that predicts
    causal, windows: of each layer
    outputs:   V'
    markov:    DSpark's correction
    candidates: of DFlash 2's selector, whose convolutions read two rows; 0 for none
    copies:    whether it holds the target's embedding and output layer too, here random values
    """

    config: Mapping[str, object] = field(default_factory=dict)
    prefix: str = ""
    nested: bool = False
    features: int = 3
    rows: int = 6
    first_row: int = 1
    causal: tuple[bool, bool] = (False, False)
    windows: tuple[int, int] = (4096, 4096)
    outputs: int = VOCAB
    sinks: bool = False
    soft_cap: float | None = None
    scale: float = 1.0
    markov: Literal["vanilla", "gated", "rnn"] | None = None
    copies: bool = False
    candidates: int = 0


def of_authors(more: Mapping[str, object] | None = None, **top: object) -> dict[str, object]:
    """Return the keys of DFlash's authors; `more` are further ones of `dflash_config`."""
    nested = {"mask_token_id": MASK, "target_layer_ids": [1, 3, 4], **(more or {})}
    return {"block_size": 6, "num_target_layers": LAYERS, "dflash_config": nested, **top}


def of_speculators(form: str, **more: object) -> dict[str, object]:
    return {
        "speculators_model_type": form,
        "aux_hidden_state_layer_ids": [2, 4, 5],
        "block_size": 6,
        "mask_token_id": MASK,
        **more,
    }


SAMPLES = {
    "DFlash, the authors'": Sample(of_authors(), prefix="model."),
    "DFlash, in windows": Sample(
        of_authors(layer_types=["sliding_attention", "full_attention"], sliding_window=4),
        causal=(True, False),
        windows=(4, 4096),
    ),
    "DFlash, scaled and capped": Sample(
        of_authors(
            {
                "causal": False,
                "final_logit_softcapping": 2.0,
                "input_embedding_scale": 1.5,
                "output_multiplier": 0.5,
            }
        ),
        soft_cap=2.0,
        scale=1.5,
    ),
    "JetSpec": Sample(of_authors({"causal_head": True}), causal=(True, True)),
    "DFlash, with sinks, and layers that follow from their number": Sample(
        {"block_size": 6, "dflash_config": {"mask_token_id": MASK, "draft_window_size": 5}},
        windows=(5, 5),
        features=2,
        sinks=True,
    ),
    "DFlash, speculators": Sample(of_speculators("dflash"), nested=True, outputs=50),
    "DFlash, speculators, the root predicts": Sample(
        of_speculators("dflash", sample_from_anchor=True), nested=True, first_row=0
    ),
    "DFlash 2": Sample(
        of_authors(
            {
                "conv_kernel_size": 2,
                "conv_group_size": 8,
                "selector_rank": RANK,
                "selector_top_k": 7,
                "output_multiplier": 0.5,
                "final_logit_softcapping": 2.0,
            },
            layer_types=["sliding_attention"] * 2,
            sliding_window=6,
        ),
        windows=(6, 6),
        candidates=7,
        soft_cap=2.0,
    ),
    "DSpark, DeepSpec": Sample(
        {
            "block_size": 6,
            "mask_token_id": MASK,
            "target_layer_ids": [1, 3, 4],
            "markov_rank": RANK,
            "layer_types": ["sliding_attention", "linear_attention"],  # of the target
            "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": BASE},
        },
        first_row=0,
        markov="vanilla",
        copies=True,
    ),
    "DSpark, SpecForge": Sample(
        of_authors({"projector_type": "dspark"}, markov_rank=RANK), first_row=0, markov="vanilla"
    ),
    "DSpark, causal and gated": Sample(
        of_authors({"causal": True, "sample_from_anchor": False}, rope_is_neox_style=True),
        causal=(True, True),
        markov="gated",
    ),
    "DSpark, speculators": Sample(
        of_speculators("dspark", sample_from_anchor=True),
        nested=True,
        first_row=0,
        outputs=50,
        markov="rnn",
    ),
    "DSpark, an older speculators": Sample(
        of_speculators("dspark"), nested=True, outputs=50, markov="vanilla"
    ),
}

TRAINED = {
    "DFlash": Sample(of_authors()),
    "DSpark": Sample(of_authors({"projector_type": "dspark"}), first_row=0, markov="vanilla"),
    "DFlash 2": Sample(
        of_authors({"conv_group_size": 8, "selector_rank": RANK, "selector_top_k": 7}), candidates=7
    ),
}
"""Those that learn the target's answers in tests."""


def random_tensors(sample: Sample, seed: int = 0) -> Tensors:
    """Return random tensors without a prefix."""
    rng = np.random.default_rng(seed)
    H, size = HIDDEN, 8

    def matrix(rows: int, columns: int, spread: float = 1.5) -> np.ndarray:
        return rng.normal(size=(rows, columns)) * spread / math.sqrt(columns)

    def norm(width: int) -> np.ndarray:
        return rng.uniform(0.5, 1.5, size=(width,))

    tensors = {"fc.weight": matrix(H, sample.features * HIDDEN), "hidden_norm.weight": norm(H)}
    for i in range(2):
        heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
        layer = {f"self_attn.{n}_proj.weight": matrix(h * size, H) for n, h in heads.items()}
        layer |= {
            "self_attn.o_proj.weight": matrix(H, HEADS * size),
            "self_attn.q_norm.weight": norm(size),
            "self_attn.k_norm.weight": norm(size),
            "mlp.gate_proj.weight": matrix(INNER, H),
            "mlp.up_proj.weight": matrix(INNER, H),
            "mlp.down_proj.weight": matrix(H, INNER),
            "input_layernorm.weight": norm(H),
            "post_attention_layernorm.weight": norm(H),
        }
        if sample.candidates:
            for part in ("attention_conv", "mlp_conv"):
                layer[f"{part}.base_kernel"] = rng.normal(size=(2, 2, H))
                layer[f"{part}.kernel_projection.weight"] = matrix(2 * 2 * H // 8, H, 0.5)
        if sample.sinks:
            layer["self_attn.attention_sink_bias"] = rng.normal(size=(HEADS,))
        tensors |= {f"layers.{i}.{name}": tensor for name, tensor in layer.items()}
    tensors["norm.weight"] = norm(H)
    if sample.candidates:
        for side in ("predecessor", "successor"):
            name = f"candidate_selector.{side}_codebook"
            tensors[name] = rng.normal(size=(VOCAB, RANK)) / RANK**0.25
        tensors["candidate_selector.hidden_projection.weight"] = matrix(RANK, H)
    if sample.markov is not None:
        tensors["markov_head.markov_w1.weight"] = rng.normal(size=(VOCAB, RANK))
        tensors["markov_head.markov_w2.weight"] = matrix(sample.outputs, RANK)
        tensors["confidence_head.proj.weight"] = matrix(1, H + RANK)
        tensors["confidence_head.proj.bias"] = rng.normal(size=(1,))
    more = {"gated": ("gate_proj", 1, 1), "rnn": ("joint_proj", 3, 2)}.get(sample.markov or "")
    if more is not None:
        name, outputs, inputs = more
        weight = matrix(outputs * RANK, H + inputs * RANK)
        tensors[f"markov_head.{name}.weight"] = weight
        tensors[f"markov_head.{name}.bias"] = rng.normal(size=len(weight))
    if sample.copies:
        tensors["embed_tokens.weight"] = matrix(VOCAB, H)
        tensors["lm_head.weight"] = matrix(VOCAB, H)
    if sample.outputs < VOCAB:
        tokens = np.sort(rng.permutation(VOCAB)[: sample.outputs])
        tensors["lm_head.weight"] = matrix(sample.outputs, H)
        tensors["d2t"] = tokens - np.arange(sample.outputs)
        tensors["t2d"] = np.isin(np.arange(VOCAB), tokens)
    return tensors


def write_files(folder: Path, sample: Sample, tensors: Tensors) -> Path:
    """Write the folder as it is published."""
    of_layers: dict[str, object] = {
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "rope_theta": BASE,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
    }
    top = dict(sample.config)
    if sample.nested:
        top |= {"draft_vocab_size": sample.outputs, "transformer_layer_config": of_layers}
    else:
        top = of_layers | top
    return write_folder(folder, top, {sample.prefix + name: a for name, a in tensors.items()})


@dataclass
class Reference:
    """The equations of a drafter for one text: no cache, no batch.

    embedding: of all tokens, [V, H]
    head:      the target's, [V, H]
    """

    sample: Sample
    tensors: Tensors
    embedding: np.ndarray
    head: np.ndarray

    def hidden(self, features: np.ndarray, root: int, rows: int) -> np.ndarray:
        """Return the block's rows [rows, H] after the final norm, given features [P, C]."""
        context = self.norm(features @ self.tensors["fc.weight"].T, "hidden_norm")
        x = self.embedding[[root, *[MASK] * (rows - 1)]] * self.sample.scale
        for i in range(2):
            weights = {
                n: self.tensors[f"layers.{i}.mlp.{n}_proj.weight"] for n in ("gate", "up", "down")
            }

            def attention(inner: np.ndarray, i: int = i) -> np.ndarray:
                return self.attention(context, inner, i)

            def mlp(z: np.ndarray, weights: Tensors = weights) -> np.ndarray:
                gate = z @ weights["gate"].T
                return (gate * sigmoid(gate) * (z @ weights["up"].T)) @ weights["down"].T

            inner = self.norm(x, f"layers.{i}.input_layernorm")
            x = x + self.convolved(attention, inner, f"layers.{i}.attention_conv")
            inner = self.norm(x, f"layers.{i}.post_attention_layernorm")
            x = x + self.convolved(mlp, inner, f"layers.{i}.mlp_conv")
        return self.norm(x, "norm")

    def convolved(
        self, layer: Callable[[np.ndarray], np.ndarray], u: np.ndarray, name: str
    ) -> np.ndarray:
        """Return a layer's output of rows [n, H], between DFlash 2's convolutions if it has any."""
        if not self.sample.candidates:
            return layer(u)
        computed = (u @ self.tensors[f"{name}.kernel_projection.weight"].T).reshape(
            len(u), 2, 2, -1
        )
        kernels = self.tensors[f"{name}.base_kernel"] + np.repeat(computed, 8, axis=-1)

        def mixed(rows: np.ndarray, side: int) -> np.ndarray:
            before = np.concatenate([np.zeros_like(rows[:1]), rows[:-1]])
            return kernels[:, side, 0] * rows + kernels[:, side, 1] * before

        return mixed(layer(mixed(u, 0)), 1)

    def selected(self, features: np.ndarray, root: int, path: Sequence[int]) -> np.ndarray:
        """Return DFlash 2's scores [V] of the draft after the root and a path of drafts."""
        row = self.hidden(features, root, self.sample.rows)[self.sample.first_row + len(path)]
        logits = self.logits(features, root)[len(path)]
        best = np.argsort(-logits)[: self.sample.candidates]
        before, after = (
            self.tensors[f"candidate_selector.{side}_codebook"]
            for side in ("predecessor", "successor")
        )
        projected = self.tensors["candidate_selector.hidden_projection.weight"] @ row
        scores = np.full(VOCAB, -np.inf)
        scores[best] = logits[best] + after[best] @ (before[[root, *path][-1]] * projected)
        return scores

    def logits(self, features: np.ndarray, root: int) -> np.ndarray:
        """Return the logits [drafts, V'] of the rows that predict."""
        hidden = self.hidden(features, root, self.sample.rows)[self.sample.first_row :]
        own = self.sample.outputs < VOCAB
        out = hidden @ (self.tensors["lm_head.weight"] if own else self.head).T
        if self.sample.soft_cap is None:
            return out
        out = out / 2  # its output_multiplier
        return np.tanh(out / self.sample.soft_cap) * self.sample.soft_cap

    def corrected(self, features: np.ndarray, root: int, path: Sequence[int]) -> np.ndarray:
        """Return DSpark's logits [V'] of the draft after the root and a path of drafts."""
        weights = {
            n: self.tensors.get(f"markov_head.{n}.weight") for n in ("gate_proj", "joint_proj")
        }
        rows = self.hidden(features, root, self.sample.rows)[self.sample.first_row :]
        state = np.zeros(RANK)
        for h, token in zip(rows, [root, *path], strict=False):
            before = self.tensors["markov_head.markov_w1.weight"][token]
            if weights["gate_proj"] is not None:
                bias = self.tensors["markov_head.gate_proj.bias"]
                before = sigmoid(weights["gate_proj"] @ [*h, *before] + bias) * before
            if weights["joint_proj"] is not None:
                bias = self.tensors["markov_head.joint_proj.bias"]
                gate, new, out = np.split(weights["joint_proj"] @ [*state, *before, *h] + bias, 3)
                state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(new)
                before = np.tanh(out)
        correction = self.tensors["markov_head.markov_w2.weight"] @ before
        return self.logits(features, root)[len(path)] + correction

    def attention(self, context: np.ndarray, x: np.ndarray, i: int) -> np.ndarray:
        def projected(rows: np.ndarray, name: str) -> np.ndarray:
            weight = self.tensors[f"layers.{i}.self_attn.{name}_proj.weight"]
            return (rows @ weight.T).reshape(len(rows), -1, 8)

        P, n = len(context), len(x)
        everything = np.concatenate([context, x])
        name = f"layers.{i}.self_attn"
        k = rotated(self.norm(projected(everything, "k"), f"{name}.k_norm"), 0)
        q = rotated(self.norm(projected(x, "q"), f"{name}.q_norm"), P)
        v = projected(everything, "v")
        out = np.zeros((n, HEADS, 8))
        for row in range(n):
            near = [j for j in range(P) if P + row - j < self.sample.windows[i]]
            last = row + 1 if self.sample.causal[i] else n
            read = [*near, *range(P, P + last)]
            for head in range(HEADS):
                group = head // (HEADS // KV_HEADS)
                scores = k[read, group] @ q[row, head] / math.sqrt(8)
                weights = np.exp(scores)
                sink = (
                    np.exp(self.tensors[f"{name}.attention_sink_bias"][head])
                    if self.sample.sinks
                    else 0
                )
                out[row, head] = weights / (weights.sum() + sink) @ v[read, group]
        return out.reshape(n, -1) @ self.tensors[f"{name}.o_proj.weight"].T

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6)
        return x / scale * self.tensors[f"{name}.weight"]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def rotated(x: np.ndarray, start: int) -> np.ndarray:
    """Rotate [R, heads, size] by positions from `start` on."""
    half = x.shape[-1] // 2
    angles = (start + np.arange(len(x)))[:, None, None] * BASE ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def load(folder: Path, target: Target) -> BlockDrafter:
    drafter = DrafterFolder(folder).load(target)
    assert isinstance(drafter, BlockDrafter)
    return drafter
