"""The GGUF architectures that are read. No MLX is imported here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from redrafter_mlx.weights.gguf.architectures import attention, experts, names, recurrent
from redrafter_mlx.weights.gguf.architectures.architecture import Architecture
from redrafter_mlx.weights.gguf.architectures.names import QKV
from redrafter_mlx.weights.gguf.keys import Keys

_LANGUAGE = "language_model.model.layers"

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", names.LLAMA, pairs=True, traditional=True),
    "llama with experts": Architecture(
        "mixtral", names.MIXTRAL, scalings=(), pairs=True, traditional=True
    ),
    "mistral3": Architecture("llama", names.LLAMA, pairs=True, traditional=True),
    "mistral3 with temperature": Architecture(
        "ministral3", names.LLAMA, settings=attention.ministral3,
        scalings=("yarn", "yarn with yarn_log_multiplier"), pairs=True,
    ),
    "qwen2": Architecture("qwen2", names.LLAMA, biased=QKV),
    "qwen2vl": Architecture("qwen2", names.LLAMA, biased=QKV),
    "qwen2moe": Architecture(
        "qwen2_moe", {**names.ATTENTION_AND_NORM, **names.SPARSE, **names.SHARED_GATED},
        biased=QKV, scalings=(),
    ),
    "qwen3": Architecture("qwen3", {**names.LLAMA, **names.NORMED_HEADS}),
    "qwen3vl": Architecture("qwen3", {**names.LLAMA, **names.NORMED_HEADS}),
    "qwen3moe": Architecture(
        "qwen3_moe", {**names.ATTENTION_AND_NORM, **names.NORMED_HEADS, **names.SPARSE},
        scalings=(),
    ),
    "qwen3vlmoe": Architecture(
        "qwen3_moe", {**names.ATTENTION_AND_NORM, **names.NORMED_HEADS, **names.SPARSE},
        scalings=(),
    ),
    "qwen35": Architecture(
        "qwen3_5", names.QWEN35, names.QWEN35_TOP, _LANGUAGE, settings=recurrent.qwen3_5,
        scalings=(), partial=True, tiled=True, wide=True,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe", names.QWEN35_MOE, names.QWEN35_TOP, _LANGUAGE, settings=recurrent.qwen3_5,
        scalings=(), partial=True, tiled=True, wide=True,
    ),
    "qwen3next": Architecture(
        "qwen3_5_moe",  # qwen3_next's class wants rows of two tensors, of any types, in turn
        names.QWEN3_NEXT, names.QWEN35_TOP, _LANGUAGE, settings=recurrent.qwen3_5,
        scalings=(), partial=True, wide=True,
    ),
    "gemma": Architecture("gemma", names.LLAMA, scalings=(), adds_one=True, wide=True),
    "gemma2": Architecture(
        "gemma2", names.GEMMA, settings=attention.gemma2, scalings=(), adds_one=True, wide=True
    ),
    "gemma3": Architecture(
        "gemma3_text", {**names.GEMMA, **names.NORMED_HEADS}, settings=attention.gemma3,
        scalings=("linear",), adds_one=True, wide=True,
    ),
    "gemma4": Architecture(
        "gemma4_text", names.GEMMA4, names.GEMMA4_TOP, settings=attention.gemma4,
        scalings=("proportional",), wide=True,
    ),
    "phi3": Architecture(
        "phi3", names.PHI3, settings=attention.phi3, scalings=("longrope",), partial=True
    ),
    "gpt-oss": Architecture(
        "gpt_oss", names.GPT_OSS,
        biased=(*QKV, "attn_output", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps",
                "ffn_down_exps"),
        settings=experts.gpt_oss, scalings=("yarn",), wide=True,
    ),
    "granite": Architecture("granite", names.LLAMA, settings=attention.granite, pairs=True),
    "granitemoe": Architecture(
        "granitemoe", names.GRANITE_MOE, settings=attention.granite, pairs=True
    ),
    "granitemoe with shared experts": Architecture(
        "granitemoehybrid", names.GRANITE_HYBRID, settings=recurrent.granite_hybrid,
        scalings=(), pairs=True,
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid", names.GRANITE_HYBRID, biased=("ssm_conv1d",),
        settings=recurrent.granite_hybrid, scalings=(), pairs=True,
    ),
    "smollm3": Architecture("smollm3", names.LLAMA, pairs=True, traditional=True),
    "olmo2": Architecture("olmo2", names.OLMO),
    "olmo2 with windows": Architecture("olmo3", names.OLMO, settings=attention.olmo3),
    "olmoe": Architecture(
        "olmoe", {**names.ATTENTION_AND_NORM, **names.NORMED_HEADS, **names.SPARSE},
        settings=lambda _: {"norm_topk_prob": False},
    ),
    "exaone": Architecture(
        "exaone", names.EXAONE, names.EXAONE_TOP, "transformer.h", settings=attention.exaone
    ),
    "exaone4": Architecture("exaone4", names.OLMO, settings=attention.exaone4),
    "glm4": Architecture(
        "glm4", names.GLM4, biased=QKV, settings=attention.glm4, scalings=(), partial=True,
        traditional=True,
    ),
    "glm4moe": Architecture(
        "glm4_moe", names.GLM4_MOE, biased=QKV, settings=experts.glm4_moe, scalings=(),
        partial=True,
    ),
    "deepseek2": Architecture(
        "deepseek_v2", names.DEEPSEEK2, settings=experts.deepseek2,
        scalings=("yarn with yarn_log_multiplier",), partial=True, wide=True,
    ),
    "deepseek2 with sigmoid": Architecture(
        "deepseek_v3", names.DEEPSEEK3, settings=experts.deepseek3,
        scalings=("yarn with yarn_log_multiplier",), partial=True, wide=True,
    ),
    "bailingmoe": Architecture(
        "bailing_moe", names.BAILING, names.BAILING_TOP, settings=experts.bailing_moe,
        scalings=(), partial=True, pairs=True,
    ),
    "bailingmoe2": Architecture(
        "bailing_moe", names.BAILING, names.BAILING_TOP, settings=experts.bailing_moe,
        scalings=(), partial=True,
    ),
    "dots1": Architecture("dots1", names.DOTS1, settings=experts.dots, scalings=()),
    "minimax-m2": Architecture(
        "minimax", names.MINIMAX, settings=experts.minimax, scalings=(), partial=True, wide=True
    ),
    "command-r": Architecture(
        "cohere", {**names.ATTENTION, **names.NETWORK, **names.NORMED_HEADS}, names.EMBEDDING,
        settings=attention.cohere, scalings=(),
    ),
    "cohere2": Architecture(
        "cohere2", {**names.ATTENTION, **names.NETWORK}, names.EMBEDDING,
        settings=attention.cohere2, scalings=(),
    ),
    "starcoder2": Architecture(
        "starcoder2", names.STARCODER2,
        biased=("attn_norm", *QKV, "attn_output", "ffn_norm", "ffn_up", "ffn_down",
                "output_norm"),
        scalings=(),
    ),
    "nemotron_h": Architecture(
        "nemotron_h", names.NEMOTRON_H, names.NEMOTRON_H_TOP, "backbone.layers",
        biased=("ssm_conv1d", *QKV, "attn_output", "ffn_up", "ffn_down"),
        settings=recurrent.nemotron_h, scalings=(), partial=True, wide=True,
    ),
    "nemotron_h_moe": Architecture(
        "nemotron_h", names.NEMOTRON_H_MOE, names.NEMOTRON_H_TOP, "backbone.layers",
        biased=("ssm_conv1d",),
        settings=recurrent.nemotron_h, scalings=(), partial=True, wide=True,
    ),
    "falcon-h1": Architecture(
        "falcon_h1", names.FALCON_H1, names.FALCON_H1_TOP, biased=("ssm_conv1d",),
        settings=recurrent.falcon_h1, scalings=(), wide=True,
    ),
    "jamba": Architecture(
        "jamba", names.JAMBA, names.JAMBA_TOP, biased=("ssm_conv1d", "ssm_dt"),
        settings=recurrent.jamba, scalings=(), wide=True,
    ),
    "kimi-linear": Architecture(
        "kimi_linear", names.KIMI_LINEAR, settings=recurrent.kimi_linear, scalings=(),
        partial=True, wide=True,
    ),
    "lfm2": Architecture(
        "lfm2", names.LFM2, names.LFM2_TOP, biased=names.LFM2_BIASED, settings=recurrent.lfm2,
        scalings=(),
    ),
    "lfm2moe": Architecture(
        "lfm2_moe", names.LFM2_MOE, names.LFM2_TOP, biased=names.LFM2_BIASED,
        settings=recurrent.lfm2, scalings=(),
    ),
    "seed_oss": Architecture(
        "seed_oss",
        {**names.ATTENTION, **names.NETWORK, "post_attention_norm": "post_attention_layernorm"},
        biased=QKV, settings=attention.seed_oss,
    ),
    "ernie4_5": Architecture(
        "ernie4_5", names.LLAMA,
        biased=(*QKV, "attn_output", "ffn_gate", "ffn_up", "ffn_down"),
        settings=attention.ernie, scalings=(),
    ),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe", names.SHARED_SPARSE, settings=experts.ernie_moe, scalings=()
    ),
    "hunyuan-dense": Architecture(
        "hunyuan_v1_dense", names.HUNYUAN, settings=attention.hunyuan, scalings=()
    ),
}  # fmt: skip
"""By `general.architecture`, and by one of `VARIANTS`. Mistral's is llama."""

VARIANTS: Mapping[str, Callable[[Keys], object]] = {
    "experts": lambda keys: keys.whole("expert_count", 0),
    "shared experts": lambda keys: keys.whole("expert_shared_feed_forward_length", 0),
    "sigmoid": experts.sigmoid,
    "windows": lambda keys: keys.whole("attention.sliding_window", 0),
    "temperature": lambda keys: keys.number("attention.temperature_scale", 0.0),
}
"""What tells classes of one architecture apart: `llama with experts` has the first."""
