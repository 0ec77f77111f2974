"""Random MTP heads in their published layouts, and their equations in NumPy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from fake_hub import hub as hub
from hybrids import hybrid_model
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache
from mlx_lm.models.nemotron_h import NemotronHBlock
from tiny import HIDDEN, byte_tokenizer, random_model

from redrafter_mlx.drafting.files.forms import DrafterFolder
from redrafter_mlx.drafting.published.heads.mtp import MtpDrafter, layer_like
from redrafter_mlx.target_model.model import Target

Tensors = dict[str, mx.array]


def random_head(model: nn.Module, seed: int = 0) -> Tensors:
    """Return the tensors of a head for a model, norms with their 1, as mlx-lm names them."""
    target = Target(model)
    H, rng = target.hidden_size, np.random.default_rng(seed)

    def norm(size: int) -> mx.array:
        return mx.array(rng.normal(0.9, 0.1, size).astype(np.float32))

    tensors = {
        "fc.weight": mx.array(rng.normal(0, 0.2, (H, 2 * H)).astype(np.float32)),
        **{f"{name}.weight": norm(H) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden")},
        "norm.weight": norm(H),
    }
    for name, array in tree_flatten(layer_like(target).parameters()):
        values = norm(array.shape[0]) if array.ndim == 1 else rng.normal(0, 0.2, array.shape)
        tensors[f"layers.0.{name}"] = mx.array(values).astype(mx.float32)
    return tensors


def without_ones(tensors: Tensors) -> Tensors:
    """Return the tensors as transformers stores them: the norms' weights less 1."""
    return {name: a - 1 if a.ndim == 1 else a for name, a in tensors.items()}


def with_single_experts(tensors: Tensors) -> Tensors:
    """Return the tensors with each expert by itself, as Qwen3-Next stores them."""
    out = {}
    for name, array in tensors.items():
        if ".switch_mlp." in name:
            before, after = name.split("switch_mlp")
            after = after.replace("fc1", "up_proj").replace("fc2", "down_proj")
            out |= {f"{before}experts.{e}{after}": array[e] for e in range(array.shape[0])}
        else:
            out[name] = array
    return out


def with_fused_experts(tensors: Tensors) -> Tensors:
    """Return the tensors with fused experts, as Qwen3.5 stores them."""
    out = {name: a for name, a in tensors.items() if ".switch_mlp." not in name}
    stacked = "layers.0.mlp.switch_mlp."
    if len(out) < len(tensors):
        both = [tensors[f"{stacked}{name}_proj.weight"] for name in ("gate", "up")]
        out["layers.0.mlp.experts.gate_up_proj"] = mx.concatenate(both, axis=1)
        out["layers.0.mlp.experts.down_proj"] = tensors[f"{stacked}down_proj.weight"]
    return out


def as_deepseeks(tensors: Tensors, prefix: str = "") -> Tensors:
    """Return the tensors in the layout of DeepSeek-V3, experts one by one, as a model's layer.

    Without a prefix they are as mlx-vlm splits them off. Copies of the embedding and the output
    layer are among them.
    """
    names = {
        "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj",
        "norm": "shared_head.norm" if prefix else "shared_head_norm",
    }  # fmt: skip
    out = {}
    for name, array in (with_single_experts(tensors) if prefix else tensors).items():
        part, _, rest = name.partition(".")
        if part in names:
            out[f"{prefix or 'model.'}{names[part]}.{rest}"] = array
        else:
            own = name.removeprefix("layers.0.")
            out[f"{prefix}{own}" if prefix else f"model.mtp_block.{own}"] = array
    copies = ("embed_tokens", "shared_head.head") if prefix else ("model.embed_tokens", "lm_head")
    return out | {f"{prefix}{name}.weight": mx.zeros((258, 32)) for name in copies}


def as_mimos(tensors: Tensors, prefix: str) -> Tensors:
    """Return the tensors under the names of MiMo and of speculators."""
    names = {
        "pre_fc_norm_embedding": "token_layernorm", "pre_fc_norm_hidden": "hidden_layernorm",
        "fc": "input_proj", "norm": "final_layernorm",
    }  # fmt: skip
    out = {}
    for name, array in tensors.items():
        part, _, rest = name.partition(".")
        own = f"{names[part]}.{rest}" if part in names else name.removeprefix("layers.0.")
        out[f"{prefix}{own}"] = array
    return out


def with_joined_heads(tensors: Tensors) -> Tensors:
    """Return the tensors of latent attention with one projection, as DeepSeek-V3 stores them."""
    out, attention = dict(tensors), "layers.0.self_attn."
    keys = out.pop(f"{attention}embed_q.weight", None)
    if keys is not None:
        values = out.pop(f"{attention}unembed_out.weight")
        both = mx.concatenate([keys.swapaxes(-1, -2), values], axis=1)
        out[f"{attention}kv_b_proj.weight"] = both.reshape(-1, both.shape[-1])
    return out


def quantised(tensors: Tensors, bits: int = 8, group: int = 32) -> Tensors:
    """Return the tensors with quantised matrices, as mlx-lm stores them."""
    out = {}
    for name, array in tensors.items():
        if array.ndim == 1:
            out[name] = array
        else:
            parts = mx.quantize(array, group, bits)
            out |= dict(zip((name, name[:-6] + "scales", name[:-6] + "biases"), parts, strict=True))
    return out


def write_head(folder: Path, tensors: Mapping[str, mx.array], prefix: str = "") -> Path:
    """Write a head as a folder of its own, as mlx-vlm does: with the target's configuration."""
    folder.mkdir(parents=True)
    stored = {prefix + name: array for name, array in tensors.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), stored)
    text = {"model_type": "qwen3_5_text", "num_hidden_layers": 64, "mtp_num_hidden_layers": 1}
    config = {"model_type": "qwen3_5_mtp", "text_config": text, "block_size": 3}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_model(folder: Path, model: nn.Module) -> Path:
    """Write a model's folder in the form of the Hub, with a head among its tensors."""
    byte_tokenizer().save_pretrained(folder)
    weights = dict(tree_flatten(model.parameters()))
    head = {f"mtp.{name}": array for name, array in random_head(model).items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights | head, {"format": "mlx"})
    config = {**vars(model.args), "eos_token_id": 999}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Reference:
    """A dense head's logits along one text, position by position, in NumPy and float64.

    Qwen3.5's equations: x = fc [norm(E(t)); norm(h)]; attention with a gate on its output and
    partial rotary positions; SwiGLU; the output after `norm` is both scored and fed back.
    """

    def __init__(self, model: nn.Module, tensors: Tensors) -> None:
        self._w = {name: np.array(array, np.float64) for name, array in tensors.items()}
        self._args = model.language_model.args
        text = model.language_model.model
        self._embedding = np.array(text.embed_tokens.weight, np.float64)

    def logits(self, tokens: list[int], hidden: np.ndarray, drafts: list[int]) -> np.ndarray:
        """Return logits [1 + drafts, V] after a text and after each of the drafts that follow it.

        tokens: [P + 1], hidden: [P, H] the target's, at the first P
        """
        keys: list[np.ndarray] = []
        values: list[np.ndarray] = []
        out = np.zeros(hidden.shape[1])
        for position, h in enumerate(hidden):
            out = self._row(tokens[position + 1], h, position, keys, values)
        found = [self._embedding @ out]
        for i, token in enumerate(drafts):
            out = self._row(token, out, len(hidden) + i, keys, values)
            found.append(self._embedding @ out)
        return np.array(found)

    def _row(
        self, token: int, h: np.ndarray, position: int, keys: list[np.ndarray],
        values: list[np.ndarray],
    ) -> np.ndarray:  # fmt: skip
        a, w = self._args, self._w
        joined = [
            self._norm(self._embedding[token], "pre_fc_norm_embedding"),
            self._norm(h, "pre_fc_norm_hidden"),
        ]
        x = w["fc.weight"] @ np.concatenate(joined)
        y = self._norm(x, "layers.0.input_layernorm")
        n, k, d = a.num_attention_heads, a.num_key_value_heads, a.head_dim
        both = (w["layers.0.self_attn.q_proj.weight"] @ y).reshape(n, 2 * d)
        query, gate = both[:, :d], both[:, d:]
        key = (w["layers.0.self_attn.k_proj.weight"] @ y).reshape(k, d)
        query = self._rotated(self._norm(query, "layers.0.self_attn.q_norm"), position)
        keys.append(self._rotated(self._norm(key, "layers.0.self_attn.k_norm"), position))
        values.append((w["layers.0.self_attn.v_proj.weight"] @ y).reshape(k, d))
        read = []
        for head in range(n):
            group = head // (n // k)
            scores = np.array([query[head] @ row[group] for row in keys]) / np.sqrt(d)
            weights = np.exp(scores - scores.max())
            mixed = sum(
                p * row[group] for p, row in zip(weights / weights.sum(), values, strict=True)
            )
            read.append(mixed / (1 + np.exp(-gate[head])))
        x = x + w["layers.0.self_attn.o_proj.weight"] @ np.concatenate(read)
        y = self._norm(x, "layers.0.post_attention_layernorm")
        up, inner = (w[f"layers.0.mlp.{name}_proj.weight"] @ y for name in ("up", "gate"))
        x = x + w["layers.0.mlp.down_proj.weight"] @ (up * inner / (1 + np.exp(-inner)))
        return self._norm(x, "norm")

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt((x**2).mean(axis=-1, keepdims=True) + self._args.rms_norm_eps)
        return x / scale * self._w[f"{name}.weight"]

    def _rotated(self, x: np.ndarray, position: int) -> np.ndarray:
        size = int(x.shape[-1] * self._args.partial_rotary_factor)
        angles = position * self._args.rope_theta ** (-np.arange(0, size, 2) / size)
        first, second, rest = x[:, : size // 2], x[:, size // 2 : size], x[:, size:]
        cos, sin = np.cos(angles), np.sin(angles)
        turned = [first * cos - second * sin, second * cos + first * sin, rest]
        return np.concatenate(turned, axis=-1)


VOCAB = 258

DEEPSEEKS: dict[str, object] = {
    "kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "num_key_value_heads": 4,
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True,
    "attention_bias": False, "partial_rotary_factor": 0.5, "num_hidden_layers": 3, "head_dim": 8,
    "moe_layer_freq": 1, "use_qk_norm": True, "rope_scaling": None, "tie_word_embeddings": False,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid",
}  # fmt: skip
DEEPSEEK_LIKE = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")


def target_model(name: str = "qwen3_5") -> nn.Module:
    if name in (*DEEPSEEK_LIKE, "mimo"):
        return random_model(name, vocab_size=VOCAB, **DEEPSEEKS)
    return hybrid_model(name, vocab_size=VOCAB)


def load(folder: Path, target: Target) -> MtpDrafter:
    drafter = DrafterFolder(folder).bind(target, byte_tokenizer())
    assert isinstance(drafter, MtpDrafter)
    return drafter


def nemotron() -> nn.Module:
    """Return a tiny Nemotron-H with a layer that chooses experts."""
    experts = {
        "hybrid_override_pattern": ["M", "E", "*", "M"], "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 1.5,
    }  # fmt: skip
    return hybrid_model("nemotron_h", vocab_size=VOCAB, **experts)


def random_nemotron_head(model: nn.Module) -> Tensors:
    """Return the tensors of a head with a layer that attends and one that chooses experts."""
    rng, H = np.random.default_rng(0), HIDDEN
    tensors = {}
    for i, kind in enumerate("*E"):
        for name, array in tree_flatten(NemotronHBlock(model.args, kind).parameters()):
            tensors[f"layers.{i}.{name}"] = rng.normal(0, 0.2, array.shape)
    for name in ("0.norm", "1.norm", "0.enorm", "0.hnorm", "1.final_layernorm"):
        tensors[f"layers.{name}.weight"] = rng.normal(0.9, 0.1, H)
    tensors["layers.0.eh_proj.weight"] = rng.normal(0, 0.2, (H, 2 * H))
    return {name: mx.array(array.astype(np.float32)) for name, array in tensors.items()}


def nemotrons_logits(
    model: nn.Module, tensors: Tensors, tokens: list[int], hidden: mx.array, drafts: list[int]
) -> np.ndarray:
    """Return logits [1 + drafts, V] of a text, and after each of the drafts that follow it."""
    blocks, cache = [NemotronHBlock(model.args, kind) for kind in "*E"], KVCache()
    for i, block in enumerate(blocks):
        own = {n.removeprefix(f"layers.{i}."): a for n, a in tensors.items() if f"s.{i}." in n}
        block.load_weights([(n, a) for n, a in own.items() if n.startswith(("norm", "mixer"))])

    def normed(x: mx.array, name: str) -> mx.array:
        return mx.fast.rms_norm(x, tensors[f"layers.{name}.weight"], 1e-5)

    def row(token: int, h: mx.array) -> mx.array:
        embedded = normed(model.backbone.embeddings(mx.array([[token]])), "0.enorm")
        both = mx.concatenate([embedded, normed(h, "0.hnorm")], axis=-1)
        x = blocks[0](both @ tensors["layers.0.eh_proj.weight"].T, None, cache)
        return normed(blocks[1](x), "1.final_layernorm")

    outputs = [row(token, h[None, None]) for token, h in zip(tokens[1:], hidden, strict=True)][-1:]
    for token in drafts:
        outputs.append(row(token, outputs[-1]))
    return np.array(model.lm_head(mx.concatenate(outputs, axis=1))[0])
