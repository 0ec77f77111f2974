"""What a GGUF file of each architecture holds, and mlx-lm's names of it.

Tensor names are those of llama.cpp's converter. No MLX is imported here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from redrafter_mlx.weights.gguf import settings as of
from redrafter_mlx.weights.gguf.settings import Settings

_EMBEDDING = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_TOP = {**_EMBEDDING, "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
}  # fmt: skip
_NETWORK = {
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_FFN_NORM = {"ffn_norm": "post_attention_layernorm"}
_LLAMA = {**_ATTENTION, **_FFN_NORM, **_NETWORK}
_NORMED_HEADS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_GEMMA = {**_ATTENTION, **_NETWORK, **_NORMS_AFTER, "ffn_norm": "pre_feedforward_layernorm"}
_OLMO = {**_ATTENTION, **_NETWORK, **_NORMS_AFTER, **_NORMED_HEADS}
del _OLMO["attn_norm"]
_QKV = ("attn_q", "attn_k", "attn_v")
_PARTS = ("gate", "up", "down")


def _experts(module: str) -> dict[str, str]:
    return {f"ffn_{part}_exps": f"{module}.{part}_proj" for part in _PARTS}


def _shared(module: str) -> dict[str, str]:
    return {f"ffn_{part}_shexp": f"{module}.{part}_proj" for part in _PARTS}


_SPARSE = {"ffn_gate_inp": "mlp.gate", **_experts("mlp.switch_mlp")}
_SHARED_GATED = {
    **_shared("mlp.shared_expert"), "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}  # fmt: skip
_LFM2 = {
    **_ATTENTION, "attn_norm": "operator_norm", "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm", "shortconv.conv": "conv.conv", "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}  # fmt: skip
_LFM2_TOP = {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm"}
_LFM2_BIASED = ("shortconv.conv", "shortconv.in_proj", "shortconv.out_proj")
_QWEN35 = {
    **_ATTENTION, **_NORMED_HEADS, "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d", "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj", "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
}  # fmt: skip
_MIXTRAL = _experts("block_sparse_moe.switch_mlp")


@dataclass(frozen=True)
class Architecture:
    """What a GGUF architecture is in mlx-lm.

    model_type:  mlx-lm's name
    layer:       module of a layer, or one of its whole tensor names -> mlx-lm's path
    top:         module outside of layers -> mlx-lm's path
    root:        what mlx-lm's class puts before these paths
    biased:      modules that may have a bias
    settings:    see `Settings`
    scalings:    kinds of rope scaling that mlx-lm's class applies
    partial:     whether only a part of each head may be rotated
    pairs:       whether rows of queries and keys are permuted for rotation of adjacent pairs
    traditional: whether mlx-lm's class rotates adjacent pairs, if it is told to
    tiled:       whether the first value heads of all key heads come first
    adds_one:    whether norms hold the one that mlx-lm's class adds
    wide:        whether activations exceed float16's range: arithmetic on a GPU is in bfloat16
    """

    model_type: str
    layer: Mapping[str, str]
    top: Mapping[str, str] = field(default_factory=lambda: _TOP)
    root: str = ""
    biased: tuple[str, ...] = ()
    settings: Settings = lambda _: {}
    scalings: tuple[str, ...] = ("linear", "yarn", "llama3")
    partial: bool = False
    pairs: bool = False
    traditional: bool = False
    tiled: bool = False
    adds_one: bool = False
    wide: bool = False

    def path(self, tensor: str) -> str | None:
        """Return mlx-lm's name of a tensor; None if no model of this architecture has it.

        `blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`.
        """
        found = re.fullmatch(r"blk\.(\d+)\.(.+)", tensor)
        names, name = (self.layer, found[2]) if found else (self.top, tensor)
        before = f"{self.root}model.layers.{found[1]}." if found else self.root
        if name in names:
            return f"{before}{names[name]}"
        module, _, part = name.rpartition(".")
        holds = part == "weight" or (part == "bias" and module in self.biased)
        return f"{before}{names[module]}.{part}" if holds and module in names else None


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", _LLAMA, pairs=True, traditional=True),
    "llama with experts": Architecture(
        "mixtral",
        {**_ATTENTION, **_FFN_NORM, **_MIXTRAL, "ffn_gate_inp": "block_sparse_moe.gate"},
        scalings=(), pairs=True, traditional=True,
    ),
    "mistral3": Architecture("llama", _LLAMA, pairs=True, traditional=True),
    "mistral3 with temperature": Architecture(
        "ministral3", _LLAMA, settings=of.ministral3,
        scalings=("yarn", "yarn with yarn_log_multiplier"), pairs=True,
    ),
    "qwen2": Architecture("qwen2", _LLAMA, biased=_QKV),
    "qwen2vl": Architecture("qwen2", _LLAMA, biased=_QKV),
    "qwen2moe": Architecture(
        "qwen2_moe",
        {**_ATTENTION, **_FFN_NORM, **_SPARSE, **_SHARED_GATED},
        biased=_QKV, scalings=(),
    ),
    "qwen3": Architecture("qwen3", {**_LLAMA, **_NORMED_HEADS}),
    "qwen3vl": Architecture("qwen3", {**_LLAMA, **_NORMED_HEADS}),
    "qwen3moe": Architecture(
        "qwen3_moe", {**_ATTENTION, **_FFN_NORM, **_NORMED_HEADS, **_SPARSE}, scalings=()
    ),
    "qwen3vlmoe": Architecture(
        "qwen3_moe", {**_ATTENTION, **_FFN_NORM, **_NORMED_HEADS, **_SPARSE}, scalings=()
    ),
    "qwen35": Architecture(
        "qwen3_5", {**_QWEN35, **_NETWORK},
        root="language_model.", settings=of.qwen3_5,
        scalings=(), partial=True, tiled=True, wide=True,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe", {**_QWEN35, **_SPARSE, **_SHARED_GATED},
        root="language_model.", settings=of.qwen3_5,
        scalings=(), partial=True, tiled=True, wide=True,
    ),
    "qwen3next": Architecture(
        "qwen3_5_moe",  # qwen3_next's class wants rows of two tensors, of any types, in turn
        {**_QWEN35, "ssm_ba": "linear_attn.in_proj_ba", **_SPARSE, **_SHARED_GATED},
        root="language_model.", settings=of.qwen3_5, scalings=(), partial=True, wide=True,
    ),
    "gemma": Architecture("gemma", _LLAMA, scalings=(), adds_one=True, wide=True),
    "gemma2": Architecture(
        "gemma2", _GEMMA, settings=of.gemma2, scalings=(), adds_one=True, wide=True
    ),
    "gemma3": Architecture(
        "gemma3_text", {**_GEMMA, **_NORMED_HEADS},
        settings=of.gemma3, scalings=("linear",), adds_one=True, wide=True,
    ),
    "gemma4": Architecture(
        "gemma4_text",
        {**_GEMMA, **_NORMED_HEADS, "inp_gate": "per_layer_input_gate",
         "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm",
         "layer_output_scale.weight": "layer_scalar", "ffn_gate_inp": "router.proj",
         "ffn_gate_inp.scale": "router.scale", "ffn_down_exps.scale": "router.per_expert_scale",
         "ffn_gate_up_exps": "experts.switch_glu.gate_up_proj",
         "ffn_down_exps": "experts.switch_glu.down_proj",
         "post_ffw_norm_1": "post_feedforward_layernorm_1",
         "post_ffw_norm_2": "post_feedforward_layernorm_2",
         "pre_ffw_norm_2": "pre_feedforward_layernorm_2"},
        top={**_EMBEDDING, "per_layer_token_embd": "model.embed_tokens_per_layer",
             "per_layer_model_proj": "model.per_layer_model_projection",
             "per_layer_proj_norm": "model.per_layer_projection_norm"},
        settings=of.gemma4, scalings=("proportional",), wide=True,
    ),
    "phi3": Architecture(
        "phi3",
        {"attn_norm": "input_layernorm", "attn_qkv": "self_attn.qkv_proj",
         "attn_output": "self_attn.o_proj", **_FFN_NORM,
         "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
        settings=of.phi3, scalings=("longrope",), partial=True,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        {**_ATTENTION, "attn_sinks.weight": "self_attn.sinks",
         "post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router",
         **_experts("mlp.experts")},
        biased=(*_QKV, "attn_output", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps",
                "ffn_down_exps"),
        settings=of.gpt_oss, scalings=("yarn",), wide=True,
    ),
    "granite": Architecture("granite", _LLAMA, settings=of.granite, pairs=True),
    "granitemoe": Architecture(
        "granitemoe",
        {**_ATTENTION, **_FFN_NORM, **_MIXTRAL, "ffn_gate_inp": "block_sparse_moe.router.layer"},
        settings=of.granite, pairs=True,
    ),
    "smollm3": Architecture("smollm3", _LLAMA, pairs=True, traditional=True),
    "olmo2": Architecture("olmo2", _OLMO),
    "olmo2 with windows": Architecture("olmo3", _OLMO, settings=of.olmo3),
    "olmoe": Architecture(
        "olmoe", {**_ATTENTION, **_FFN_NORM, **_NORMED_HEADS, **_SPARSE},
        settings=lambda _: {"norm_topk_prob": False},
    ),
    "exaone4": Architecture("exaone4", _OLMO, settings=of.exaone4),
    "glm4moe": Architecture(
        "glm4_moe",
        {**_ATTENTION, **_NORMED_HEADS, "post_attention_norm": "post_attention_layernorm",
         **_NETWORK, **_SPARSE, **_shared("mlp.shared_experts"),
         "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
        biased=_QKV, settings=of.glm4_moe, scalings=(), partial=True,
    ),
    "deepseek2": Architecture(
        "deepseek_v3",
        {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj",
         "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
         "attn_q_b": "self_attn.q_b_proj", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
         "attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_k_b": "self_attn.embed_q",
         "attn_v_b": "self_attn.unembed_out", "attn_output": "self_attn.o_proj",
         **_FFN_NORM, **_NETWORK, **_SPARSE, **_shared("mlp.shared_experts"),
         "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
        settings=of.deepseek3, scalings=("yarn with yarn_log_multiplier",), partial=True,
        wide=True,
    ),
    "bailingmoe2": Architecture(
        "bailing_moe",
        {"attn_norm": "input_layernorm", "attn_qkv": "attention.query_key_value",
         "attn_output": "attention.dense", "attn_q_norm": "attention.query_layernorm",
         "attn_k_norm": "attention.key_layernorm", **_FFN_NORM, **_NETWORK, **_SPARSE,
         **_shared("mlp.shared_experts"), "ffn_gate_inp": "mlp.gate.gate_proj",
         "exp_probs_b.bias": "mlp.gate.expert_bias"},
        top={**_TOP, "token_embd": "model.word_embeddings"},
        settings=of.bailing_moe, scalings=(), partial=True,
    ),
    "minimax-m2": Architecture(
        "minimax",
        {**_ATTENTION, **_FFN_NORM, **_NORMED_HEADS, **_MIXTRAL,
         "ffn_gate_inp": "block_sparse_moe.gate",
         "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
        settings=of.minimax, scalings=(), partial=True, wide=True,
    ),
    "glm4": Architecture(
        "glm4",
        {**_ATTENTION, "post_attention_norm": "post_self_attn_layernorm", **_FFN_NORM,
         "post_ffw_norm": "post_mlp_layernorm", "ffn_up": "mlp.gate_up_proj",
         "ffn_down": "mlp.down_proj"},
        biased=_QKV, settings=of.glm4, scalings=(), partial=True, traditional=True,
    ),
    "command-r": Architecture(
        "cohere", {**_ATTENTION, **_NETWORK, **_NORMED_HEADS},
        top=_EMBEDDING, settings=of.cohere, scalings=(),
    ),
    "cohere2": Architecture(
        "cohere2", {**_ATTENTION, **_NETWORK}, top=_EMBEDDING, settings=of.cohere2, scalings=()
    ),
    "starcoder2": Architecture(
        "starcoder2",
        {**_ATTENTION, **_FFN_NORM, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        biased=("attn_norm", *_QKV, "attn_output", "ffn_norm", "ffn_up", "ffn_down",
                "output_norm"),
        scalings=(),
    ),
    "lfm2": Architecture(
        "lfm2",
        {**_LFM2, "ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3",
         "ffn_down": "feed_forward.w2"},
        top=_LFM2_TOP, biased=_LFM2_BIASED, settings=of.lfm2, scalings=(),
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        {**_LFM2, "ffn_gate": "feed_forward.gate_proj", "ffn_up": "feed_forward.up_proj",
         "ffn_down": "feed_forward.down_proj", "ffn_gate_inp": "feed_forward.gate",
         **_experts("feed_forward.switch_mlp"), "exp_probs_b.bias": "feed_forward.expert_bias"},
        top=_LFM2_TOP, biased=_LFM2_BIASED, settings=of.lfm2, scalings=(),
    ),
    "seed_oss": Architecture(
        "seed_oss",
        {**_ATTENTION, **_NETWORK, "post_attention_norm": "post_attention_layernorm"},
        biased=_QKV, settings=of.seed_oss,
    ),
    "ernie4_5": Architecture(
        "ernie4_5", _LLAMA, biased=(*_QKV, "attn_output", "ffn_gate", "ffn_up", "ffn_down"),
        settings=of.ernie, scalings=(),
    ),
}  # fmt: skip
"""By `general.architecture`, and by one of `VARIANTS`. Mistral's is llama."""

VARIANTS = {
    "experts": "expert_count", "windows": "attention.sliding_window",
    "temperature": "attention.temperature_scale",
}  # fmt: skip
"""Metadata that tells classes of one architecture apart: `llama with experts` has the first."""
