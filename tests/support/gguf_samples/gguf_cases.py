"""Cases of GGUF architectures: metadata, and what else llama.cpp's converter changes."""

from __future__ import annotations

from gguf_conversions import (
    as_deepseek2,
    as_granite_hybrid,
    as_jamba,
    as_kimi_linear,
    as_ling,
    as_nemotron,
    as_qwen3_next,
    as_qwen35,
    as_state_space,
    without_last_axis,
)
from gguf_files import Case, Q
from gguf_settings import (
    LONG,
    write_bailing,
    write_bamba,
    write_cohere,
    write_cohere2,
    write_deepseek2_of_2024,
    write_deepseek2_of_2025,
    write_deepseek3,
    write_dots,
    write_ernie_moe,
    write_gemma2,
    write_gemma3,
    write_gemma3_of_ollama,
    write_gemma4_moe,
    write_gemma4_small,
    write_glm4_moe,
    write_gpt_oss,
    write_granite,
    write_granite_experts,
    write_granite_hybrid,
    write_granite_hybrid_experts,
    write_half_rotary,
    write_hunyuan,
    write_jamba,
    write_kimi_linear,
    write_lfm2,
    write_lfm2_moe,
    write_ling,
    write_minimax,
    write_ministral3,
    write_moe,
    write_moe_granite,
    write_moe_with_shared,
    write_nemotron,
    write_nemotron_moe,
    write_phi3,
    write_qwen35,
    write_qwen35_moe,
    write_state_space,
    write_windows,
    write_yarn,
)

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


GEMMA3 = {
    "model_type": "gemma3_text", "num_hidden_layers": 7, "head_dim": 32,
    "query_pre_attn_scalar": 32, "sliding_window": 8,
    "rope_scaling": {"type": "linear", "factor": 8.0},
}  # fmt: skip
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXTRAL = (
    ("switch_mlp.gate_proj", "experts.w1"), ("switch_mlp.down_proj", "experts.w2"),
    ("switch_mlp.up_proj", "experts.w3"),
)  # fmt: skip
LAYER_NORM = {"layer_norm_eps": 1e-3, "norm_epsilon": 1e-3}
GRANITE = {
    "attention_bias": False, "mlp_bias": False, "attention_multiplier": 0.3,
    "embedding_multiplier": 6.0, "residual_multiplier": 0.4, "logits_scaling": 5.0,
    "tie_word_embeddings": True,
}  # fmt: skip
GEMMA4 = {
    "model_type": "gemma4_text", "head_dim": 16, "global_head_dim": 32, "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8,
    "final_logit_softcapping": 3.0, "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 50000.0,
                           "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0}},
}  # fmt: skip
GEMMA4_NAMES = (
    ("layer_scalar", "layer_scalar.weight"), ("router.scale", "router.proj.scale"),
    ("router.per_expert_scale", "experts.down_proj.scale"), 
    ("switch_glu.gate_proj", "gate_up_proj"), ("switch_glu.up_proj", "gate_up_proj"),
    ("switch_glu.", ""),
)  # fmt: skip
LFM2 = {
    "norm_eps": 1e-6, "conv_bias": True, "conv_L_cache": 3,
    "layer_types": ["conv", "full_attention"],
}  # fmt: skip
QWEN35 = {
    "model_type": "qwen3_5", "linear_num_value_heads": 6, "linear_num_key_heads": 2,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "rope_parameters": {"type": "default", "rope_theta": 50000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
QWEN35_NAMES = (
    ("language_model.", ""), ("A_log", "A_log."), ("dt_bias", "dt_proj.bias"),
)  # fmt: skip
QWEN3_MOE = {
    "model_type": "qwen3_moe", **MOE, "num_experts": 8, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
STATE_SPACE = {
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_d_conv": 4,
    "mamba_n_groups": 1, "mamba_proj_bias": False, "mamba_conv_bias": True,
}  # fmt: skip
STATE_SPACE_NAMES = (
    ("A_log", "A_log."), ("mamba.D", "mamba.D."), ("mixer.D", "mixer.D."),
    ("mamba.dt_bias", "mamba.dt_proj.bias"), ("mixer.dt_bias", "mixer.dt_proj.bias"),
)  # fmt: skip
GRANITE_HYBRID = {
    "model_type": "granitemoehybrid", **GRANITE, **STATE_SPACE, "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"], "position_embedding_type": "nope",
}  # fmt: skip
NEMOTRON = {
    "model_type": "nemotron_h", "num_hidden_layers": 4, "mamba_num_heads": 4,
    "mamba_head_dim": 32, "ssm_state_size": 16, "conv_kernel": 4, "n_groups": 2,
    "mamba_proj_bias": False, "mlp_bias": False, "attention_bias": False, "use_bias": False,
    "use_conv_bias": True, "layer_norm_epsilon": 1e-6,
}  # fmt: skip
DEEPSEEK2 = {
    "model_type": "deepseek_v2", **MOE, "n_routed_experts": 8, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "head_dim": 40, "q_lora_rank": None, "kv_lora_rank": 32,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 32, "v_head_dim": 16, "n_group": 2,
    "topk_group": 1, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5,
    "num_key_value_heads": 4, "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
}  # fmt: skip
CASES = {
    "llama": Case("llama", {"model_type": "llama"}, pairs=True),
    "llama with experts": Case(
        "llama",
        {"model_type": "mixtral", "num_experts_per_tok": 2, "num_local_experts": 8},
        write_moe, types=(("switch_mlp", Q.Q8_0),), renamed=MIXTRAL, pairs=True,
    ),
    "qwen2vl": Case("qwen2vl", {"model_type": "qwen2"}),
    "mistral3": Case("mistral3", {"model_type": "llama"}, pairs=True),
    "mistral3 with temperature": Case(
        "mistral3",
        {"model_type": "ministral3",
         "rope_parameters": {**YARN, "rope_theta": 50000.0, "llama_4_scaling_beta": 0.1,
                             "mscale": 1.0, "mscale_all_dim": 1.0}},
        write_ministral3, pairs=True,
    ),
    "qwen2moe": Case(
        "qwen2moe",
        {"model_type": "qwen2_moe", **MOE, "num_experts": 8, "shared_expert_intermediate_size": 48},
        write_moe_with_shared,
    ),
    "qwen3vl": Case("qwen3vl", {"model_type": "qwen3"}),
    "qwen3vlmoe": Case(
        "qwen3vlmoe", QWEN3_MOE, write_moe,
    ),
    "qwen35": Case(
        "qwen35", QWEN35, write_qwen35, types=(("proj", Q.Q5_0),), renamed=QWEN35_NAMES,
        change=as_qwen35,
    ),
    "qwen35moe": Case(
        "qwen35moe",
        {**QWEN35, "model_type": "qwen3_5_moe", **MOE, "num_experts": 8,
         "shared_expert_intermediate_size": 48},
        write_qwen35_moe, renamed=QWEN35_NAMES, change=as_qwen35,
    ),
    "qwen3next": Case(
        "qwen3next",
        {**QWEN35, "model_type": "qwen3_next", **MOE, "num_experts": 8, "norm_topk_prob": True,
         "shared_expert_intermediate_size": 48, "partial_rotary_factor": 0.5,
         "decoder_sparse_step": 1, "mlp_only_layers": []},
        write_qwen35_moe, renamed=QWEN35_NAMES, change=as_qwen3_next, read_as="qwen3_5_moe",
        types=(("in_proj", Q.Q8_0), ("switch_mlp", Q.Q4_0)),
    ),
    "gemma": Case("gemma", {"model_type": "gemma", "head_dim": 32}, added=1.0),
    "granitemoe": Case(
        "granitemoe", {"model_type": "granitemoe", **GRANITE, **MOE, "num_local_experts": 8},
        write_moe_granite, renamed=MIXTRAL, pairs=True,
    ),
    "smollm3": Case(
        "smollm3", {"model_type": "smollm3", "num_hidden_layers": 4}, pairs=True,
    ),
    "olmo2": Case("olmo2", {"model_type": "olmo2"}),
    "olmo2 with windows": Case(
        "olmo2",
        {"model_type": "olmo3", "num_hidden_layers": 4, "sliding_window": 8,
         "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"]},
        write_windows,
    ),
    "olmoe": Case("olmoe", {"model_type": "olmoe", **MOE, "num_experts": 8}, write_moe),
    "exaone4": Case(
        "exaone4",
        {"model_type": "exaone4", "rope_scaling": None, "sliding_window": None,
         "sliding_window_pattern": None},
    ),
    "exaone4 with windows": Case(
        "exaone4",
        {"model_type": "exaone4", "num_hidden_layers": 4, "rope_scaling": None,
         "sliding_window": 8, "sliding_window_pattern": "LLGL"},
        write_windows,
    ),
    "lfm2": Case(
        "lfm2",
        {"model_type": "lfm2", **LFM2, "block_dim": 64, "block_multiple_of": 1,
         "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False},
        write_lfm2, change=without_last_axis, kv_heads=(0, 2),
        renamed=(("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")),
    ),
    "lfm2moe": Case(
        "lfm2moe",
        {"model_type": "lfm2_moe", **LFM2, **MOE, "num_experts": 8, "num_dense_layers": 1,
         "norm_topk_prob": True, "use_expert_bias": True},
        write_lfm2_moe, change=without_last_axis, kv_heads=(0, 2),
        renamed=(("expert_bias", "expert_bias.bias"),),
    ),
    "glm4moe": Case(
        "glm4moe",
        {"model_type": "glm4_moe", **MOE, "n_routed_experts": 8, "n_shared_experts": 1,
         "first_k_dense_replace": 1, "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
         "use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.5,
         "routed_scaling_factor": 2.5, "rope_scaling": None},
        write_glm4_moe, renamed=(("e_score_correction_bias", "e_score_correction.bias"),),
        predicting=1,
    ),
    "granitemoe with shared experts": Case(
        "granitemoe",
        {"model_type": "granitemoehybrid", **GRANITE, "num_local_experts": 8,
         "num_experts_per_tok": 2, "shared_intermediate_size": 64,
         "layer_types": ["attention"] * 2},
        write_granite_experts, change=as_granite_hybrid, renamed=MIXTRAL, pairs=True,
        types=(("input_linear", Q.Q8_0),),
    ),
    "granitehybrid": Case(
        "granitehybrid", GRANITE_HYBRID, write_granite_hybrid, kv_heads=(0, 2, 0),
        change=as_granite_hybrid, renamed=STATE_SPACE_NAMES, pairs=True,
        types=(("in_proj", Q.Q8_0), ("out_proj", Q.Q4_0)),
    ),
    "granitehybrid, rotated": Case(
        "granitehybrid",
        {**GRANITE_HYBRID, "position_embedding_type": "rope", "tie_word_embeddings": False},
        write_bamba, kv_heads=(0, 2, 0), change=as_granite_hybrid, renamed=STATE_SPACE_NAMES,
        pairs=True,
    ),
    "granitehybrid, experts": Case(
        "granitehybrid",
        {**GRANITE_HYBRID, "num_local_experts": 8, "num_experts_per_tok": 2,
         "shared_intermediate_size": 64},
        write_granite_hybrid_experts, kv_heads=(0, 2, 0), change=as_granite_hybrid,
        renamed=(*MIXTRAL, *STATE_SPACE_NAMES), pairs=True,
        parted=("input_linear",), types=(("shared_experts.up_proj", Q.Q8_0),),
    ),
    "nemotron_h": Case(
        "nemotron_h", {**NEMOTRON, "hybrid_override_pattern": ["M", "-", "*", "M"]},
        write_nemotron, kv_heads=(0, 0, 2, 0), units=(0, 96, 0, 0), change=as_nemotron,
        renamed=STATE_SPACE_NAMES, types=(("up_proj", Q.Q8_0),), pairs=True,
    ),
    "nemotron_h_moe": Case(
        "nemotron_h_moe",
        {**NEMOTRON, **MOE, "hybrid_override_pattern": ["M", "E", "*", "E"],
         "moe_shared_expert_intermediate_size": 48, "n_routed_experts": 8, "n_shared_experts": 1,
         "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
         "moe_latent_size": 32},
        write_nemotron_moe, kv_heads=(0, 0, 2, 0, 2), units=(0, 32, 0, 32, 32), predicting=1,
        change=as_nemotron, pairs=True, types=(("switch_mlp", Q.Q8_0),),
        renamed=(("mixer.dt_bias", "mixer.dt.bias"),
                 ("e_score_correction_bias", "e_score_correction.bias"), *STATE_SPACE_NAMES),
    ),
    "falcon-h1": Case(
        "falcon-h1",
        {"model_type": "falcon_h1", **STATE_SPACE, "mamba_d_ssm": 128, "mamba_rms_norm": True},
        write_state_space, change=as_state_space, types=(("_proj", Q.Q8_0),),
        renamed=(*STATE_SPACE_NAMES, ("feed_forward", "mlp"),
                 ("pre_ff_layernorm.weight", "pre_ff_layernorm.weight.")),
    ),
    "deepseek2 of 2024": Case(
        "deepseek2", DEEPSEEK2, write_deepseek2_of_2024, types=(("kv_b_proj", Q.Q8_0),)
    ),
    "deepseek2 of 2025": Case(
        "deepseek2", DEEPSEEK2, write_deepseek2_of_2025, change=as_deepseek2,
        parted=("kv_b_proj",), types=(("k_b_proj", Q.Q8_0), ("v_b_proj", Q.Q8_0)),
    ),
    "ernie4_5-moe": Case(
        "ernie4_5-moe",
        {"model_type": "ernie4_5_moe", "use_bias": False, "moe_num_experts": 8, "moe_k": 2,
         "moe_intermediate_size": 32, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
         "tie_word_embeddings": True},
        write_ernie_moe, types=(("switch_mlp", Q.Q8_0),),
    ),
    "exaone": Case(
        "exaone", {"model_type": "exaone", "num_layers": 2, "layer_norm_epsilon": 1e-6},
    ),
    "dots1": Case(
        "dots1",
        {"model_type": "dots1", **MOE, "n_routed_experts": 8, "n_shared_experts": 2,
         "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
        write_dots, renamed=(("e_score_correction_bias", "e_score_correction.bias"),),
    ),
    "jamba": Case(
        "jamba",
        {"model_type": "jamba", "num_hidden_layers": 4, "attn_layer_offset": 1,
         "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2,
         "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_expand": 2, "num_experts": 8,
         "num_experts_per_tok": 2, "mamba_dt_rank": 8, "tie_word_embeddings": False},
        write_jamba, kv_heads=(0, 2, 0, 2), change=as_jamba, types=(("out_proj", Q.Q8_0),),
        renamed=(("A_log", "A_log."), ("mamba.D", "mamba.D."),
                 ("feed_forward.switch_mlp", "mlp.experts")),
    ),
    "kimi-linear": Case(
        "kimi-linear",
        {"model_type": "kimi_linear", **MOE, "num_hidden_layers": 3, "head_dim": 40,
         "linear_attn_config": {"kda_layers": [1, 3], "num_heads": 4, "head_dim": 32,
                                "short_conv_kernel_size": 4},
         "model_max_length": 512, "num_experts": 8, "num_experts_per_token": 2,
         "num_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
         "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 8, "v_head_dim": 16,
         "mla_use_nope": True},
        write_kimi_linear, kv_heads=(0, 1, 0), change=as_kimi_linear,
        types=(("embed_q", Q.Q8_0), ("switch_mlp", Q.Q4_0)),
        renamed=(("A_log", "A_log."), ("dt_bias", "dt_proj.bias"), ("embed_q", "k_b_proj"),
                 ("unembed_out", "v_b_proj"),
                 ("e_score_correction_bias", "e_score_correction.bias"),
                 *((f"{part}_conv.conv", f"{part}_conv1d") for part in "qkv")),
    ),
    "hunyuan-dense": Case(
        "hunyuan-dense",
        {"model_type": "hunyuan_v1_dense", "tie_word_embeddings": True,
         "rope_scaling": {"alpha": 50.0, "factor": 1.0, "type": "dynamic"}},
        write_hunyuan,
    ),
    "bailingmoe": Case(
        "bailingmoe",
        {"model_type": "bailing_moe", **MOE, "num_experts": 8, "num_shared_experts": 2,
         "norm_topk_prob": True, "first_k_dense_replace": 0},
        write_ling, change=as_ling, renamed=(("gate.gate_proj", "gate"),),
        parted=("query_key_value",), types=(("q_proj", Q.Q8_0), ("v_proj", Q.F16)),
    ),
    "deepseek2 with sigmoid": Case(
        "deepseek2",
        {"model_type": "deepseek_v3", **MOE, "n_routed_experts": 8, "n_shared_experts": 1,
         "first_k_dense_replace": 1, "head_dim": 40, "q_lora_rank": 32, "kv_lora_rank": 32,
         "qk_rope_head_dim": 8, "qk_nope_head_dim": 32, "v_head_dim": 16, "n_group": 2,
         "topk_group": 1, "routed_scaling_factor": 2.5, "num_key_value_heads": 1,
         "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}},
        write_deepseek3, types=(("embed_q", Q.Q8_0), ("unembed_out", Q.Q4_0)),
        renamed=(("e_score_correction_bias", "e_score_correction.bias"),
                 ("embed_q", "k_b_proj"), ("unembed_out", "v_b_proj")),
    ),
    "bailingmoe2": Case(
        "bailingmoe2",
        {"model_type": "bailing_moe", **MOE, "num_experts": 8, "num_shared_experts": 2,
         "moe_shared_expert_intermediate_size": 48, "norm_topk_prob": True,
         "first_k_dense_replace": 1, "use_qk_norm": True, "partial_rotary_factor": 0.5,
         "moe_router_enable_expert_bias": True, "score_function": "sigmoid", "n_group": 2,
         "topk_group": 1, "routed_scaling_factor": 2.5},
        write_bailing,
        renamed=(("expert_bias", "expert_bias.bias"), ("gate.gate_proj", "gate")),
    ),
    "minimax-m2": Case(
        "minimax-m2",
        {"model_type": "minimax", "num_experts_per_tok": 2, "num_local_experts": 8,
         "shared_intermediate_size": 0, "rotary_dim": 8},
        write_minimax,
        renamed=(*MIXTRAL, ("e_score_correction_bias", "e_score_correction.bias")),
    ),
    "glm4": Case(
        "glm4", {"model_type": "glm4", "attention_bias": True, "partial_rotary_factor": 0.5},
        write_half_rotary,
    ),
    "command-r": Case(
        "command-r",
        {"model_type": "cohere", **LAYER_NORM, "logit_scale": 0.5, "use_qk_norm": True},
        write_cohere,
    ),
    "cohere2": Case(
        "cohere2",
        {"model_type": "cohere2", "num_hidden_layers": 4, **LAYER_NORM, "logit_scale": 0.5,
         "sliding_window": 8},
        write_cohere2,
    ),
    "starcoder2": Case("starcoder2", {"model_type": "starcoder2", **LAYER_NORM}),
    "seed_oss": Case("seed_oss", {"model_type": "seed_oss", "attention_bias": True}),
    "ernie4_5": Case("ernie4_5", {"model_type": "ernie4_5", "use_bias": False}),
    "qwen2": Case("qwen2", {"model_type": "qwen2"}),
    "qwen2, yarn": Case("qwen2", {"model_type": "qwen2", "rope_scaling": YARN}, write_yarn),
    "qwen3": Case(
        "qwen3", {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
        types=(("proj", Q.Q8_0),),
    ),
    "qwen3moe": Case(
        "qwen3moe", QWEN3_MOE, write_moe, types=(("switch_mlp", Q.Q8_0),),
    ),
    "gemma2": Case(
        "gemma2",
        {"model_type": "gemma2", "head_dim": 32, "query_pre_attn_scalar": 32,
         "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
        write_gemma2, added=1.0,
    ),
    "gemma3": Case("gemma3", GEMMA3, write_gemma3, added=1.0),
    "gemma3, Ollama's": Case("gemma3", GEMMA3, write_gemma3_of_ollama, added=1.0),
    "gemma4, small": Case(
        "gemma4",
        {**GEMMA4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 32,
         "vocab_size_per_layer_input": 267, "use_double_wide_mlp": True},
        write_gemma4_small, renamed=GEMMA4_NAMES, units=(96, 96, 192, 192),
        types=(("embed_tokens_per_layer", Q.Q8_0),),
    ),
    "gemma4, large": Case(
        "gemma4",
        {**GEMMA4, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
         "num_global_key_value_heads": 1, "attention_k_eq_v": True, "enable_moe_block": True,
         "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32},
        write_gemma4_moe, renamed=GEMMA4_NAMES, kv_heads=(2, 1, 2, 1),
        types=(("switch_glu", Q.Q4_0),),
    ),
    "phi3": Case(
        "phi3",
        {"model_type": "phi3", "partial_rotary_factor": 0.5, "rope_scaling": LONG,
         "original_max_position_embeddings": 64},
        write_phi3,
    ),
    "gpt-oss": Case(
        "gpt-oss",
        {"model_type": "gpt_oss", **MOE, "num_local_experts": 8, "intermediate_size": 32,
         "sliding_window": 8, "rope_scaling": YARN},
        write_gpt_oss, types=(("experts", Q.MXFP4), ("self_attn", Q.Q8_0)),
    ),
    "granite": Case(
        "granite",
        {"model_type": "granite", **GRANITE},
        write_granite, types=(("_proj", Q.Q8_0),), pairs=True,
    ),
}  # fmt: skip
