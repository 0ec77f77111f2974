"""Random EAGLE drafters in their published layouts, and their equations in NumPy."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np
from tiny import HIDDEN, LLAMA3_ROPE

Tensors = dict[str, np.ndarray]

HEADS, KV_HEADS, INNER = 4, 2, 40
VOCAB, LAYERS = 258, 7
"""Sizes of the target; with 7 layers EAGLE-3 reads layers 2, 3 and 4."""


@dataclass(frozen=True)
class Sample:
    """A drafter to write.

    config: keys of config.json in addition to the sizes
    nested: as in speculators' files, where the decoder layer's keys have a section of their own
    prefix: prefix of the first layer's tensors
    copied_head: its output layer is a frozen copy of the target's, which is used instead
    scale:  spread of random weights; nothing norms what EAGLE's first layer returns, so that with
            larger weights rounding alone grows to 1e-4 of the logits in its second
    """

    form: int = 3
    config: Mapping[str, object] = field(default_factory=dict)
    nested: bool = False
    prefix: str = "layers.0."
    hidden_size: int = HIDDEN
    head_size: int = 8
    features: int = 3
    n_layers: int = 1
    outputs: int = VOCAB
    biases: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    embedding: bool = False
    own_head: bool = True
    copied_head: bool = False
    scale: float = 1.5


NATIVE = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "bias": False}
SPECULATORS = {
    "speculators_model_type": "eagle3",
    "eagle_aux_hidden_state_layer_ids": None,
    "norm_before_residual": True,
}
SAMPLES = {
    "EAGLE-3, the authors'": Sample(
        config=NATIVE | {"head_dim": 5}, prefix="midlayer.", outputs=61
    ),
    "EAGLE-3, a token for each output": Sample(config=NATIVE, prefix="midlayer."),
    "EAGLE-3, speculators": Sample(
        config=SPECULATORS | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        nested=True,
        outputs=50,
        embedding=True,
    ),
    "EAGLE-3, speculators for Qwen3": Sample(
        config=SPECULATORS | {"norm_before_residual": False, "norm_before_fc": True},
        nested=True,
        outputs=50,
        head_size=16,
        norms=("input_norm.weight", "q_norm", "k_norm"),
    ),
    "EAGLE-3.1": Sample(
        config=NATIVE | {"fc_norm": True, "norm_output": True},
        prefix="midlayer.",
        outputs=50,
        norms=("fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"),
    ),
    "EAGLE-3, smaller than its target": Sample(
        config=NATIVE | {"target_hidden_size": HIDDEN, "rope_scaling": LLAMA3_ROPE},
        prefix="midlayer.",
        hidden_size=24,
        outputs=50,
        embedding=True,
    ),
    "EAGLE-3, layers by their outputs": Sample(
        config=NATIVE | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 5]}},
        prefix="midlayer.",
        outputs=50,
        biases=("fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    ),
    "EAGLE-3, several layers": Sample(
        config=SPECULATORS, nested=True, n_layers=3, outputs=50, own_head=True
    ),
    "EAGLE-3, DeepSpec": Sample(
        config={"target_layer_ids": [0, 1, 2, 4, 5], "rope_theta": 1e6},
        features=5,
        norms=("q_norm", "k_norm"),
        embedding=True,
        copied_head=True,
    ),
    "EAGLE-3, in a sliding window, up to the final norm": Sample(
        config=SPECULATORS
        | {"eagle_aux_hidden_state_layer_ids": [2, 4, LAYERS], "sliding_window": 4},
        nested=True,
        outputs=50,
    ),
    "EAGLE-3, the target's output layer": Sample(config=NATIVE, prefix="midlayer.", own_head=False),
    "EAGLE, with a bias": Sample(
        form=1, features=1, config={"rope_theta": 5e5}, biases=("fc",), embedding=True,
        own_head=False,
    ),
    "EAGLE for Qwen2": Sample(
        form=1, features=1, config={"bias": False, "qkv_bias": True}, own_head=False,
        biases=("q_proj", "k_proj", "v_proj"), embedding=True,
    ),
    "EAGLE, two layers": Sample(
        form=1, features=1, n_layers=2, embedding=True, own_head=False, scale=1.0,
    ),
}  # fmt: skip


def random_tensors(sample: Sample, seed: int = 0) -> Tensors:
    """Return random tensors under the names of the `layers.0.*` layout."""
    rng = np.random.default_rng(seed)
    H, size = sample.hidden_size, sample.head_size

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.normal(size=(rows, columns)) * sample.scale / math.sqrt(columns)

    def norm(width: int) -> np.ndarray:
        return rng.uniform(0.5, 1.5, size=(width,))

    columns = sample.features * HIDDEN if sample.form == 3 else 2 * HIDDEN
    tensors = {"fc.weight": matrix(H, columns)}
    for i in range(sample.n_layers):
        of_tokens = sample.form == 3 and i == 0
        read = 2 * H if of_tokens else H
        heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
        layer = {f"self_attn.{n}_proj.weight": matrix(h * size, read) for n, h in heads.items()}
        layer |= {
            "self_attn.o_proj.weight": matrix(H, HEADS * size),
            "mlp.gate_proj.weight": matrix(INNER, H),
            "mlp.up_proj.weight": matrix(INNER, H),
            "mlp.down_proj.weight": matrix(H, INNER),
            "post_attention_layernorm.weight": norm(H),
        }
        if of_tokens:
            layer["hidden_norm.weight"] = norm(H)
        if of_tokens or i > 0:
            layer["input_layernorm.weight"] = norm(H)
        layer |= {f"self_attn.{n}.weight": norm(size) for n in sample.norms if "." not in n}
        tensors |= {f"layers.{i}.{name}": tensor for name, tensor in layer.items()}
    for name in [*tensors]:
        part = name.split(".")[-2]
        if part in sample.biases:
            tensors[name.removesuffix("weight") + "bias"] = rng.normal(size=len(tensors[name]))
    for name in sample.norms:
        if "." in name:
            tensors[name] = norm(columns if name.startswith("input") else HIDDEN)
    if sample.form == 3:
        tensors["norm.weight"] = norm(H)
    if sample.own_head:
        tensors["lm_head.weight"] = matrix(sample.outputs, H)
    if sample.embedding:
        tensors["embed_tokens.weight"] = rng.normal(size=(VOCAB, H))
    if sample.outputs < VOCAB:
        tokens = np.sort(rng.permutation(VOCAB)[: sample.outputs])
        tensors["d2t"] = tokens - np.arange(sample.outputs)
        tensors["t2d"] = np.isin(np.arange(VOCAB), tokens)
    return tensors


def write_files(folder: Path, sample: Sample, tensors: Tensors) -> Path:
    """Write the folder as it is published."""
    of_layer: dict[str, object] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": sample.hidden_size,
        "intermediate_size": INNER,
        "num_hidden_layers": sample.n_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
    }
    top = dict(sample.config)
    if sample.form == 3:
        top["draft_vocab_size"] = sample.outputs
    if sample.nested:
        of_layer |= {"rms_norm_eps": 1e-6, "rope_parameters": top.pop("rope_parameters", None)}
        if "sliding_window" in top:
            of_layer |= {"layer_types": ["sliding_attention"] * sample.n_layers}
            of_layer["sliding_window"] = top.pop("sliding_window")
        top["transformer_layer_config"] = of_layer
    else:
        top |= of_layer
    named = {name.replace("layers.0.", sample.prefix): a for name, a in tensors.items()}
    return write_folder(folder, top, named)


def write_folder(folder: Path, config: Mapping[str, object], tensors: Tensors) -> Path:
    """Write a drafter's configuration and tensors, those in float64 as float32; return `folder`."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {
        name: mx.array(tensor, mx.float32) if tensor.dtype == np.float64 else mx.array(tensor)
        for name, tensor in tensors.items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    return folder


@dataclass
class Reference:
    """The equations of a drafter, for whole lists of rows: no cache, no masks, no batch.

    embedding: of all tokens, [V, H]
    head:      the target's, [V, D]
    """

    sample: Sample
    tensors: Tensors
    embedding: np.ndarray
    head: np.ndarray

    def logits(
        self, features: np.ndarray, tokens: Sequence[int], drafts: Sequence[int]
    ) -> np.ndarray:
        """Return the logits of the token after `drafts`, which follow `tokens`.

        tokens[i] is the token after the position whose features are features[i]
        """
        context, tokens = [*self.fuse(features)], [*tokens]
        hidden = self.rows(np.array(context), tokens)
        for draft in drafts:
            context.append(self.feedback(hidden[-1]))
            tokens.append(draft)
            hidden = self.rows(np.array(context), tokens)
        return self.output(hidden[-1])

    def fuse(self, features: np.ndarray) -> np.ndarray:
        if self.sample.form == 1:
            return features
        if self.sample.config.get("norm_before_fc"):
            features = self.norm(features, "input_norm")
        if self.sample.config.get("fc_norm"):
            parts = np.split(features, self.sample.features, axis=-1)
            normed = [self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)]
            features = np.concatenate(normed, axis=-1)
        return self.linear(features, "fc")

    def rows(self, context: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
        """Return the outputs [R, H] of all rows; each row attends to itself and those before it."""
        e, x = self.embedding[list(tokens)], context
        if self.sample.form == 1:
            x = self.linear(np.concatenate([e, x], axis=-1), "fc")
        for i in range(self.sample.n_layers):
            name, inner = f"layers.{i}", x
            if f"{name}.hidden_norm.weight" in self.tensors:
                b = self.norm(x, f"{name}.hidden_norm")
                inner = np.concatenate([self.norm(e, f"{name}.input_layernorm"), b], axis=-1)
                x = b if self.sample.config.get("norm_before_residual") else x
            elif f"{name}.input_layernorm.weight" in self.tensors:
                inner = self.norm(x, f"{name}.input_layernorm")
            x = x + self.attention(inner, f"{name}.self_attn")
            z = self.norm(x, f"{name}.post_attention_layernorm")
            gate = self.linear(z, f"{name}.mlp.gate_proj")
            up = self.linear(z, f"{name}.mlp.up_proj")
            x = x + self.linear(gate / (1 + np.exp(-gate)) * up, f"{name}.mlp.down_proj")
        return x

    def feedback(self, hidden: np.ndarray) -> np.ndarray:
        return self.norm(hidden, "norm") if self.sample.config.get("norm_output") else hidden

    def output(self, hidden: np.ndarray) -> np.ndarray:
        if self.sample.form == 3:
            hidden = self.norm(hidden, "norm")
        own = self.sample.own_head and not self.sample.copied_head
        head = self.tensors["lm_head.weight"] if own else self.head
        return head @ hidden

    def keys(self, x: np.ndarray, name: str) -> np.ndarray:
        """Return the keys [R, K, size] with their rotary positions."""
        k = self.linear(x, f"{name}.k_proj").reshape(len(x), -1, self.sample.head_size)
        return self.rotated(self.norm(k, f"{name}.k_norm"))

    def attention(self, x: np.ndarray, name: str) -> np.ndarray:
        R, size = len(x), self.sample.head_size
        q = self.linear(x, f"{name}.q_proj").reshape(R, -1, size)
        q, k = self.rotated(self.norm(q, f"{name}.q_norm")), self.keys(x, name)
        v = self.linear(x, f"{name}.v_proj").reshape(R, -1, size)
        out = np.zeros((R, q.shape[1], size))
        window = int(str(self.sample.config.get("sliding_window", R)))
        for row in range(R):
            for head in range(q.shape[1]):
                group = head // (q.shape[1] // k.shape[1])
                read = slice(max(0, row + 1 - window), row + 1)
                scores = k[read, group] @ q[row, head] / math.sqrt(size)
                weights = np.exp(scores - scores.max())
                out[row, head] = weights / weights.sum() @ v[read, group]
        return self.linear(out.reshape(R, -1), f"{name}.o_proj")

    def rotated(self, x: np.ndarray) -> np.ndarray:
        """Rotate [R, heads, size] by the position of each row."""
        config, half = self.sample.config, x.shape[-1] // 2
        new = config.get("rope_parameters") or config
        assert isinstance(new, Mapping)
        speeds = float(str(new.get("rope_theta", 1e4))) ** (-np.arange(half) / half)
        if config.get("rope_scaling"):
            speeds = llama3_speeds(speeds)
        angles = np.arange(len(x))[:, None, None] * speeds
        a, b = x[..., :half], x[..., half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        """Apply RMSNorm; without a weight of this name, return `x` unchanged."""
        if f"{name}.weight" not in self.tensors:
            return x
        eps = 1e-6 if self.sample.nested else self.sample.config.get("rms_norm_eps", 1e-6)
        scale = np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)
        return x / scale * self.tensors[f"{name}.weight"]

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", 0.0)


def llama3_speeds(speeds: np.ndarray) -> np.ndarray:
    """Scale frequencies as Llama 3.1 does: low ones divided by the factor, then a ramp."""
    factor, low, high, context = (
        float(LLAMA3_ROPE[key])  # type: ignore[arg-type]
        for key in (
            "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
        )
    )  # fmt: skip
    turns = context * speeds / (2 * math.pi)
    ramp = np.clip((turns - low) / (high - low), 0, 1)
    return speeds * (ramp + (1 - ramp) / factor)
