"""What a GGUF file of each architecture holds, and mlx-lm's names of it.

Tensor names and metadata keys are those of llama.cpp's converter. No MLX is imported here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from redrafter_mlx.errors import DamagedFileError, UnsupportedModelError
from redrafter_mlx.weights.gguf.header import GGUFHeader

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
}  # fmt: skip
_NETWORK = {
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
_LLAMA = {**_ATTENTION, **_NETWORK}
_NORMED_HEADS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip


def _experts(module: str) -> dict[str, str]:
    return {f"ffn_{part}_exps": f"mlp.{module}.{part}_proj" for part in ("gate", "up", "down")}


@dataclass(frozen=True)
class Keys:
    """Metadata of one architecture: `attention.scale` is `granite.attention.scale` in the file.

    Raises DamagedFileError for a value that is missing or of another type.
    """

    header: GGUFHeader
    architecture: str

    def whole(self, key: str, default: int | None = None) -> int:
        return self.header.get(f"{self.architecture}.{key}", int, default)

    def number(self, key: str, default: float | None = None) -> float:
        return self.header.get(f"{self.architecture}.{key}", float, default)

    def text(self, key: str, default: str) -> str:
        return self.header.get(f"{self.architecture}.{key}", str, default)

    @property
    def hidden(self) -> int:
        return self.whole("embedding_length")

    @property
    def heads(self) -> int:
        return self.whole("attention.head_count")

    @property
    def head_dim(self) -> int:
        """Size of a head; DamagedFileError if there is no head to divide by."""
        if self.hidden <= 0 or self.heads <= 0:
            path = self.header.path
            raise DamagedFileError(f"{path}: {self.hidden} hidden units in {self.heads} heads")
        return self.whole("attention.key_length", self.hidden // self.heads)


Settings = Callable[[Keys], Mapping[str, object]]
"""Return the keys of config.json that only this architecture has."""


@dataclass(frozen=True)
class Architecture:
    """What a GGUF architecture is in mlx-lm.

    model_type:  mlx-lm's name
    layer:       module of a layer, or one of its whole tensor names -> mlx-lm's path
    biased:      modules of a layer that have a bias
    settings:    see `Settings`
    scalings:    kinds of rope scaling that mlx-lm's class applies
    partial:     whether only a part of each head may be rotated
    pairs:       whether rows of queries and keys are permuted for rotation of adjacent pairs
    traditional: whether mlx-lm's class rotates adjacent pairs, if it is told to
    adds_one:    whether norms hold the one that mlx-lm's class adds
    wide:        whether activations exceed float16's range: arithmetic on a GPU is in bfloat16
    """

    model_type: str
    layer: Mapping[str, str]
    biased: tuple[str, ...] = ()
    settings: Settings = lambda _: {}
    scalings: tuple[str, ...] = ("linear", "yarn", "llama3")
    partial: bool = False
    pairs: bool = False
    traditional: bool = False
    adds_one: bool = False
    wide: bool = False

    def path(self, tensor: str) -> str | None:
        """Return mlx-lm's name of a tensor; None if no model of this architecture has it.

        `blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`.
        """
        stem, _, part = tensor.rpartition(".")
        if stem in _TOP and part == "weight":
            return f"{_TOP[stem]}.weight"
        found = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if found is None:
            return None
        layer, module = f"model.layers.{found[1]}", found[2]
        if f"{module}.{part}" in self.layer:
            return f"{layer}.{self.layer[f'{module}.{part}']}"
        holds = part == "weight" or (part == "bias" and module in self.biased)
        return f"{layer}.{self.layer[module]}.{part}" if holds and module in self.layer else None


def _qwen3_moe(keys: Keys) -> Mapping[str, object]:
    return {
        "num_experts": keys.whole("expert_count"),
        "num_experts_per_tok": keys.whole("expert_used_count"),
        "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


def _gemma_scale(keys: Keys, largest: int) -> float:
    """Return the square of what divides queries: in the largest model, it is not a head's size."""
    layers = keys.whole("block_count")
    return keys.hidden / keys.heads if layers == largest else float(keys.head_dim)


def _gemma2(keys: Keys) -> Mapping[str, object]:
    return {
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _gemma_scale(keys, 46),
    }


def _window_pattern(keys: Keys) -> int:
    """Return P: all layers but every P-th have a window. A file gives P, or a list of booleans."""
    key = "attention.sliding_window_pattern"
    value = keys.header.metadata.get(f"{keys.architecture}.{key}")
    if not isinstance(value, list):
        return keys.whole(key, 6)
    period = value.index(False) + 1 if False in value else 0
    if not period or value != [(i + 1) % period != 0 for i in range(len(value))]:
        raise UnsupportedModelError(f"{keys.header.path}: layers with a window in no fixed pattern")
    return period


def _gemma3(keys: Keys) -> Mapping[str, object]:
    local = keys.number("rope.local.freq_base", 10000.0)  # Ollama's name of it
    return {
        "sliding_window": keys.whole("attention.sliding_window"),
        "sliding_window_pattern": _window_pattern(keys),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", local),
        "query_pre_attn_scalar": _gemma_scale(keys, 62),
    }


def _phi3(keys: Keys) -> Mapping[str, object]:
    rotary = keys.whole("rope.dimension_count", keys.head_dim)
    return {
        "partial_rotary_factor": rotary / keys.head_dim,
        "original_max_position_embeddings": keys.whole(
            "rope.scaling.original_context_length", keys.whole("context_length")
        ),
    }


def _gpt_oss(keys: Keys) -> Mapping[str, object]:
    return {
        "intermediate_size": keys.whole("expert_feed_forward_length"),
        "num_local_experts": keys.whole("expert_count"),
        "num_experts_per_tok": keys.whole("expert_used_count"),
        "sliding_window": keys.whole("attention.sliding_window"),
    }


def _granite(keys: Keys) -> Mapping[str, object]:
    return {
        "attention_bias": False,
        "mlp_bias": False,
        "attention_multiplier": keys.number("attention.scale", keys.head_dim**-0.5),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
    }


_GEMMA = {**_ATTENTION, **_NETWORK, **_FOUR_NORMS}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", _LLAMA, pairs=True, traditional=True),
    "qwen2": Architecture("qwen2", _LLAMA, biased=("attn_q", "attn_k", "attn_v")),
    "qwen3": Architecture("qwen3", {**_LLAMA, **_NORMED_HEADS}),
    "qwen3moe": Architecture(
        "qwen3_moe",
        {**_ATTENTION, **_NORMED_HEADS, "ffn_norm": "post_attention_layernorm",
         "ffn_gate_inp": "mlp.gate", **_experts("switch_mlp")},
        settings=_qwen3_moe,
        scalings=(),
    ),
    "gemma2": Architecture(
        "gemma2", _GEMMA, settings=_gemma2, scalings=(), adds_one=True, wide=True
    ),
    "gemma3": Architecture(
        "gemma3_text",
        {**_GEMMA, **_NORMED_HEADS},
        settings=_gemma3,
        scalings=("linear",),
        adds_one=True,
        wide=True,
    ),
    "phi3": Architecture(
        "phi3",
        {"attn_norm": "input_layernorm", "attn_qkv": "self_attn.qkv_proj",
         "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
         "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
        settings=_phi3,
        scalings=("longrope",),
        partial=True,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        {**_ATTENTION, "attn_sinks.weight": "self_attn.sinks",
         "post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router",
         **_experts("experts")},
        biased=("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_inp", "ffn_gate_exps",
                "ffn_up_exps", "ffn_down_exps"),
        settings=_gpt_oss,
        scalings=("yarn",),
        wide=True,
    ),
    "granite": Architecture("granite", _LLAMA, settings=_granite, pairs=True),
}  # fmt: skip
"""By `general.architecture`. Mistral's is llama."""
