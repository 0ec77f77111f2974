"""Tiny random models of architectures whose layers keep a recurrent state."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from tiny import random_model

_GATED_DELTA: dict[str, object] = {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
    "head_dim": 8,
    "full_attention_interval": 3,
}
_EXPERTS: dict[str, object] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 32,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
_LATENT: dict[str, object] = {
    "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": None, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
_LING: dict[str, object] = {
    "num_hidden_layers": 5, "layer_group_size": 2, "group_norm_size": 2, "num_experts": 4,
    "num_experts_per_tok": 2, "num_shared_experts": 1, "moe_intermediate_size": 32, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0,
    "moe_shared_expert_intermediate_size": 32, "num_key_value_heads": 4,
}  # fmt: skip
_MAMBA: dict[str, object] = {
    "num_hidden_layers": 4, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_proj_bias": False,
    "mamba_d_state": 6, "mamba_d_conv": 4, "mamba_n_groups": 2,
}  # fmt: skip
_CONVOLUTIONS: dict[str, object] = {
    "num_hidden_layers": 4, "norm_eps": 1e-5, "conv_bias": True, "conv_L_cache": 3,
    "full_attn_idxs": [1, 3],
}  # fmt: skip
HYBRIDS: dict[str, dict[str, object]] = {
    "qwen3_next": {**_GATED_DELTA, **_EXPERTS, "mlp_only_layers": [0],
                   "partial_rotary_factor": 0.5},
    "qwen3_5": {**_GATED_DELTA, "tie_word_embeddings": True},
    "qwen3_5_moe": {**_GATED_DELTA, **_EXPERTS},
    "olmo_hybrid": {**_GATED_DELTA, "linear_allow_neg_eigval": True, "attention_bias": False,
                    "tie_word_embeddings": False},
    # vector gates, and latent attention without positions
    "kimi_linear": {**_LATENT, "linear_attn_config": {
        "kda_layers": [1, 2, 4], "num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4},
        "model_max_length": 512, "num_experts": 0, "moe_intermediate_size": 32,
        "mla_use_nope": True, "num_hidden_layers": 4, "head_dim": 8},
    "bailing_moe_v3": {**_LATENT, **_LING, "head_dim": 8, "short_conv_kernel_size": 4},
    "kimi_k3": {**_LATENT, "linear_attn_config": {
        "kda_layers": [1, 2, 4], "num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0}, "hidden_act": "situ", "activation_situ_beta": 4.0,
        "attn_res_block_size": 2, "q_lora_rank": 8, "mla_use_output_gate": True,
        "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 32,
        "first_k_dense_replace": 1, "num_hidden_layers": 4},
    # the state-space recurrence
    "granitemoehybrid": {**_MAMBA, "embedding_multiplier": 3.0, "attention_multiplier": 0.35,
                         "logits_scaling": 4.0, "residual_multiplier": 0.5,
                         "attention_bias": False, "position_embedding_type": "nope",
                         "layer_types": ["mamba", "mamba", "attention", "mamba"],
                         "tie_word_embeddings": False,
                         "mamba_conv_bias": True},
    "nemotron_h": {"hybrid_override_pattern": ["M", "-", "*", "M"], "mamba_num_heads": 4,
                   "mamba_head_dim": 8, "mamba_proj_bias": False, "ssm_state_size": 6,
                   "conv_kernel": 4, "n_groups": 2, "mlp_bias": False, "attention_bias": False,
                   "layer_norm_epsilon": 1e-5, "use_bias": False, "use_conv_bias": True},
    "falcon_h1": {**_MAMBA, "head_dim": 8, "mamba_d_ssm": 32, "lm_head_multiplier": 1.0},
    "plamo2": {"hidden_size_per_head": 8, "mamba_d_state": 6, "mamba_num_heads": 4,
               "num_hidden_layers": 4, "tie_word_embeddings": False},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 6, "layer_norm_epsilon": 1e-5,
               "conv_kernel": 4, "n_groups": 2, "use_bias": False, "use_conv_bias": True,
               "tie_word_embeddings": True, "time_step_limit": (0.0, 10.0), "time_step_rank": 4},
    # fixed decays
    "bailing_moe_linear": {**_LING, "use_qk_norm": True, "norm_topk_prob": True},
    "bailing_hybrid": {**_LATENT, **_LING, "head_dim": 8},
    # convolutions alone
    "lfm2": {**_CONVOLUTIONS, "block_dim": 32, "block_multiple_of": 8,
             "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False},
    "gear": {"head_dim": 8, "conv_L_cache": 3, "num_hidden_layers": 4, "sliding_window": 16,
             "layer_types": ["conv_mixer", "sliding_attention", "conv_mixer", "full_attention"]},
    "lfm2_moe": {**_CONVOLUTIONS, **_EXPERTS, "use_expert_bias": True, "num_dense_layers": 1},
    # recurrences whose states are gathered from parents
    "mamba": {"state_size": 6, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True,
              "time_step_rank": 4},
    "rwkv7": {"head_dim": 8, "norm_eps": 1e-5, "a_low_rank_dim": 8, "v_low_rank_dim": 8,
              "gate_low_rank_dim": 8, "decay_low_rank_dim": 8},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1,
              "expert_layer_period": 2, "mamba_d_conv": 4, "mamba_d_state": 6, "mamba_expand": 2,
              "num_experts": 2, "num_experts_per_tok": 1, "mamba_conv_bias": True,
              "mamba_proj_bias": False, "mamba_dt_rank": 4},
    "recurrent_gemma": {"attention_bias": False, "conv1d_width": 4, "logits_soft_cap": 30.0,
                        "attention_window_size": 16, "block_types": ["recurrent", "attention"],
                        "embeddings_scale_by_sqrt_dim": True, "head_dim": 8},
    "baichuan_m1": {"sliding_window": 16, "sliding_window_layers": [0], "conv_window": 2,
                    "num_swa_attention_heads": 4, "num_swa_key_value_heads": 2},
}  # fmt: skip

ONE_OF_EACH = (
    "qwen3_5", "kimi_linear", "falcon_h1", "nemotron_h", "bailing_hybrid", "lfm2", "mamba",
    "rwkv7", "recurrent_gemma", "baichuan_m1",
)  # fmt: skip
"""One architecture for each recurrence, and for each way in which layers hold one."""

BY_RECURRENCE = [
    name if name in ONE_OF_EACH else pytest.param(name, marks=pytest.mark.exhaustive)
    for name in HYBRIDS
]
"""All of them, for tests that take seconds for each: the others run with the exhaustive ones."""


def hybrid_model(name: str, seed: int = 3, **changes: object) -> nn.Module:
    """Return a tiny random model of a hybrid architecture.

    Parameters that mlx-lm creates as zeros, for a file to fill in, are random as well: through
    zeros no state would be read.
    """
    model = random_model(name, seed, **{**HYBRIDS[name], **changes})
    empty = [
        (path, 0.3 * mx.random.normal(array.shape, dtype=array.dtype))
        for path, array in nn.utils.tree_flatten(model.parameters())
        if not path.endswith("bias") and not array.any().item()
    ]
    model.load_weights(empty, strict=False)
    mx.eval(model.parameters())
    return model
