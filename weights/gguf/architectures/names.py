"""Names of tensors, as llama.cpp's converter writes them -> mlx-lm's, within a layer or outside.

A name is of a module, or of a whole tensor such as `ssm_a`.
"""

from __future__ import annotations

QKV = ("attn_q", "attn_k", "attn_v")
_PARTS = ("gate", "up", "down")


def experts(module: str) -> dict[str, str]:
    return {f"ffn_{part}_exps": f"{module}.{part}_proj" for part in _PARTS}


def shared(module: str) -> dict[str, str]:
    return {f"ffn_{part}_shexp": f"{module}.{part}_proj" for part in _PARTS}


EMBEDDING = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
TOP = {**EMBEDDING, "output": "lm_head"}

# Of layers that attend, with one feed-forward network.
ATTENTION = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
}  # fmt: skip
NETWORK = {
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
ATTENTION_AND_NORM = {**ATTENTION, "ffn_norm": "post_attention_layernorm"}
LLAMA = {**ATTENTION_AND_NORM, **NETWORK}
NORMED_HEADS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
GEMMA = {**ATTENTION, **NETWORK, **_NORMS_AFTER, "ffn_norm": "pre_feedforward_layernorm"}
GEMMA4 = {
    **GEMMA, **NORMED_HEADS, "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm",
    "layer_output_scale.weight": "layer_scalar", "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale", "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps": "experts.switch_glu.gate_up_proj",
    "ffn_down_exps": "experts.switch_glu.down_proj",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
}  # fmt: skip
GEMMA4_TOP = {
    **EMBEDDING, "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}  # fmt: skip
OLMO = {**ATTENTION, **NETWORK, **_NORMS_AFTER, **NORMED_HEADS}
del OLMO["attn_norm"]
PHI3 = {
    "attn_norm": "input_layernorm", "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
GLM4 = {
    **ATTENTION_AND_NORM, "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm", "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
EXAONE = {
    "attn_norm": "ln_1", "attn_q": "attn.attention.q_proj", "attn_k": "attn.attention.k_proj",
    "attn_v": "attn.attention.v_proj", "attn_output": "attn.attention.out_proj",
    "ffn_norm": "ln_2", "ffn_gate": "mlp.c_fc_0", "ffn_up": "mlp.c_fc_1",
    "ffn_down": "mlp.c_proj",
}  # fmt: skip
EXAONE_TOP = {
    "token_embd": "transformer.wte", "output_norm": "transformer.ln_f", "output": "lm_head",
}  # fmt: skip
HUNYUAN = {
    **LLAMA, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm",
}  # fmt: skip
STARCODER2 = {**ATTENTION_AND_NORM, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}

# Of mixtures of experts.
SPARSE = {"ffn_gate_inp": "mlp.gate", **experts("mlp.switch_mlp")}
SHARED_GATED = {
    **shared("mlp.shared_expert"), "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}  # fmt: skip
MIXTRAL = {
    **ATTENTION_AND_NORM, "ffn_gate_inp": "block_sparse_moe.gate",
    **experts("block_sparse_moe.switch_mlp"),
}  # fmt: skip
GRANITE_MOE = {**MIXTRAL, "ffn_gate_inp": "block_sparse_moe.router.layer"}
MINIMAX = {
    **MIXTRAL, **NORMED_HEADS, "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
}  # fmt: skip
GPT_OSS = {
    **ATTENTION, "attn_sinks.weight": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router",
    **experts("mlp.experts"),
}  # fmt: skip
SHARED_SPARSE = {
    **ATTENTION_AND_NORM, **NETWORK, **SPARSE, **shared("mlp.shared_experts"),
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}  # fmt: skip
GLM4_MOE = {
    **SHARED_SPARSE, **NORMED_HEADS, "post_attention_norm": "post_attention_layernorm",
}  # fmt: skip
del GLM4_MOE["ffn_norm"]
DEEPSEEK3 = {
    **SHARED_SPARSE, "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_k_b": "self_attn.embed_q",
    "attn_v_b": "self_attn.unembed_out",
}  # fmt: skip
del DEEPSEEK3["attn_k"], DEEPSEEK3["attn_v"]
DEEPSEEK2 = {
    **DEEPSEEK3, "attn_k_b": "self_attn.k_b_proj", "attn_v_b": "self_attn.v_b_proj",
    "attn_kv_b": "self_attn.kv_b_proj",  # of files until April 2025
}  # fmt: skip
del DEEPSEEK2["exp_probs_b.bias"]
DOTS1 = {**SHARED_SPARSE, **NORMED_HEADS, **experts("mlp.experts")}
BAILING = {
    **SHARED_SPARSE, "attn_qkv": "attention.query_key_value", "attn_q": "attention.q_proj",
    "attn_k": "attention.k_proj", "attn_v": "attention.v_proj", "attn_output": "attention.dense",
    "attn_q_norm": "attention.query_layernorm", "attn_k_norm": "attention.key_layernorm",
    "ffn_gate_inp": "mlp.gate.gate_proj",
    "exp_probs_b.bias": "mlp.gate.expert_bias",
}  # fmt: skip
BAILING_TOP = {**TOP, "token_embd": "model.word_embeddings"}

# Of models some of whose layers keep a recurrent state.
_LFM2 = {
    **ATTENTION, "attn_norm": "operator_norm", "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm", "shortconv.conv": "conv.conv", "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}  # fmt: skip
LFM2 = {
    **_LFM2, "ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}  # fmt: skip
LFM2_MOE = {
    **_LFM2, "ffn_gate": "feed_forward.gate_proj", "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj", "ffn_gate_inp": "feed_forward.gate",
    **experts("feed_forward.switch_mlp"), "exp_probs_b.bias": "feed_forward.expert_bias",
}  # fmt: skip
LFM2_TOP = {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm"}
LFM2_BIASED = ("shortconv.conv", "shortconv.in_proj", "shortconv.out_proj")


def _state_space(module: str) -> dict[str, str]:
    return {
        "ssm_in": f"{module}.in_proj", "ssm_conv1d": f"{module}.conv1d",
        "ssm_dt.bias": f"{module}.dt_bias", "ssm_a": f"{module}.A_log", "ssm_d": f"{module}.D",
        "ssm_norm": f"{module}.norm", "ssm_out": f"{module}.out_proj",
    }  # fmt: skip


GRANITE_HYBRID = {**GRANITE_MOE, **NETWORK, **shared("shared_mlp"), **_state_space("mamba")}
GRANITE_HYBRID["ffn_down_shexp"] = "shared_mlp.output_linear"
NEMOTRON_H = {
    "attn_norm": "norm", "attn_q": "mixer.q_proj", "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj", "attn_output": "mixer.o_proj", "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj", **_state_space("mixer"),
}  # fmt: skip
NEMOTRON_H_MOE = {
    **NEMOTRON_H, "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.switch_mlp.fc1", "ffn_down_exps": "mixer.switch_mlp.fc2",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj", "ffn_latent_up": "mixer.fc2_latent_proj",
}  # fmt: skip
NEMOTRON_H_TOP = {
    "token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head",
}  # fmt: skip
FALCON_H1 = {
    **ATTENTION, **_state_space("mamba"), "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj", "ffn_down": "feed_forward.down_proj",
    "ffn_norm.weight": "pre_ff_layernorm.weight", "ffn_norm": "pre_ff_layernorm.weight",
}  # fmt: skip
FALCON_H1_TOP = {**TOP, "output_norm": "model.final_layernorm"}
JAMBA = {
    **ATTENTION, **_state_space("mamba"), "ssm_x": "mamba.x_proj", "ssm_dt": "mamba.dt_proj",
    "ssm_dt_norm": "mamba.dt_layernorm", "ssm_b_norm": "mamba.b_layernorm",
    "ssm_c_norm": "mamba.c_layernorm", "ffn_norm": "pre_ff_layernorm",
    "ffn_gate": "feed_forward.gate_proj", "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj", "ffn_gate_inp": "feed_forward.router",
    **experts("feed_forward.switch_mlp"),
}  # fmt: skip
del JAMBA["ssm_dt.bias"], JAMBA["ssm_norm"]
JAMBA_TOP = FALCON_H1_TOP
KIMI_LINEAR = {
    **DEEPSEEK3, **ATTENTION, "ssm_conv1d_q": "self_attn.q_conv.conv",
    "ssm_conv1d_k": "self_attn.k_conv.conv", "ssm_conv1d_v": "self_attn.v_conv.conv",
    "ssm_f_a": "self_attn.f_a_proj", "ssm_f_b": "self_attn.f_b_proj",
    "ssm_beta": "self_attn.b_proj", "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj", "ssm_a": "self_attn.A_log",
    "ssm_dt.bias": "self_attn.dt_bias", "ssm_norm": "self_attn.o_norm",
    "exp_probs_b.bias": "mlp.e_score_correction_bias",
}  # fmt: skip
_QWEN35 = {
    **ATTENTION, **NORMED_HEADS, "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d", "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj", "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
}  # fmt: skip
QWEN35 = {**_QWEN35, **NETWORK}
QWEN35_MOE = {**_QWEN35, **SPARSE, **SHARED_GATED}
QWEN3_NEXT = {**QWEN35_MOE, "ssm_ba": "linear_attn.in_proj_ba"}
QWEN35_TOP = {module: f"language_model.{path}" for module, path in TOP.items()}
