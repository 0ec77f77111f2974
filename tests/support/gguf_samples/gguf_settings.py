"""Metadata of GGUF files, as llama.cpp's converter writes them for each architecture."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np

LONG = {"type": "longrope", "long_factor": [1.0, 1.5, 2.0, 4.0], "short_factor": [1.0] * 4}


def write_yarn(writer: Any) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(16)


def write_moe(writer: Any) -> None:
    writer.add_expert_count(8)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(32)


def write_gpt_oss(writer: Any) -> None:
    write_moe(writer)
    write_yarn(writer)
    writer.add_sliding_window(8)


def write_gemma2(writer: Any) -> None:
    writer.add_attn_logit_softcapping(5.0)
    writer.add_final_logit_softcapping(3.0)
    writer.add_sliding_window(4096)


def write_gemma3(writer: Any) -> None:
    writer.add_sliding_window(8)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(8.0)


def write_gemma3_of_ollama(writer: Any) -> None:
    """Write the same settings in other words."""
    write_gemma3(writer)
    writer.add_sliding_window_pattern([(i + 1) % 6 != 0 for i in range(7)])
    writer.add_float32("gemma3.rope.local.freq_base", 10000.0)


def write_phi3(writer: Any) -> None:
    writer.add_rope_dimension_count(8)
    writer.add_rope_scaling_orig_ctx_len(64)
    for name in ("long", "short"):
        factors = np.array(LONG[f"{name}_factor"], np.float32)
        writer.add_tensor(f"rope_factors_{name}.weight", factors)


def write_granite(writer: Any) -> None:
    writer.add_attention_scale(0.3)
    writer.add_embedding_scale(6.0)
    writer.add_residual_scale(0.4)
    writer.add_logit_scale(5.0)


def write_moe_with_shared(writer: Any) -> None:
    write_moe(writer)
    writer.add_expert_shared_feed_forward_length(48)


def write_moe_granite(writer: Any) -> None:
    write_moe(writer)
    write_granite(writer)


def write_windows(writer: Any) -> None:
    writer.add_sliding_window(8)
    writer.add_sliding_window_pattern([True, True, False, True])


def write_cohere(writer: Any) -> None:
    writer.add_logit_scale(0.5)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def write_cohere2(writer: Any) -> None:
    write_cohere(writer)
    writer.add_sliding_window(8)


def write_half_rotary(writer: Any) -> None:
    writer.add_rope_dimension_count(8)


def write_glm4_moe(writer: Any) -> None:
    write_moe(writer)
    write_half_rotary(writer)
    writer.add_expert_shared_count(1)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_weights_scale(2.5)
    writer.add_nextn_predict_layers(1)
    writer.add_tensor("blk.2.nextn.enorm.weight", np.ones(64, np.float32))


def write_ministral3(writer: Any) -> None:
    write_yarn(writer)
    writer.add_rope_scaling_yarn_log_mul(1.0)
    writer.add_attn_temperature_scale(0.1)


def write_lfm2(writer: Any) -> None:
    writer.add_shortconv_l_cache(3)


def write_lfm2_moe(writer: Any) -> None:
    write_lfm2(writer)
    write_moe(writer)
    writer.add_leading_dense_block_count(1)


def write_qwen35(writer: Any) -> None:
    write_half_rotary(writer)
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(32)
    writer.add_ssm_group_count(2)
    writer.add_ssm_time_step_rank(6)
    writer.add_ssm_inner_size(6 * 32)
    writer.add_full_attention_interval(2)


def write_qwen35_moe(writer: Any) -> None:
    write_qwen35(writer)
    write_moe_with_shared(writer)


def write_gemma4(writer: Any) -> None:
    writer.add_sliding_window(8)
    writer.add_sliding_window_pattern([True, False, True, False])
    writer.add_key_length_swa(16)
    writer.add_rope_freq_base_swa(5000.0)
    writer.add_final_logit_softcapping(3.0)
    factors = np.array([1.0] * 4 + [1e30] * 12, np.float32)
    writer.add_tensor("rope_freqs.weight", factors)


def write_gemma4_small(writer: Any) -> None:
    write_gemma4(writer)
    writer.add_shared_kv_layers(2)
    writer.add_embedding_length_per_layer_input(32)


def write_gemma4_moe(writer: Any) -> None:
    write_gemma4(writer)
    write_moe(writer)


def write_deepseek3(writer: Any) -> None:
    write_moe(writer)
    write_yarn(writer)
    writer.add_rope_scaling_yarn_log_mul(0.1 * 0.7)
    writer.add_rope_dimension_count(8)
    writer.add_q_lora_rank(32)
    writer.add_kv_lora_rank(32)
    writer.add_key_length_mla(40)
    writer.add_value_length_mla(16)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_scale(2.5)
    writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_group_count(2)
    writer.add_expert_group_used_count(1)


def write_bailing(writer: Any) -> None:
    write_moe(writer)
    write_half_rotary(writer)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_shared_count(2)
    writer.add_expert_weights_scale(2.5)
    writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_group_count(2)
    writer.add_expert_group_used_count(1)


def write_minimax(writer: Any) -> None:
    writer.add_expert_count(8)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(96)
    write_half_rotary(writer)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def write_state_space(writer: Any, groups: int = 1) -> None:
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(16)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_time_step_rank(4)
    writer.add_ssm_inner_size(4 * 32)


def write_granite_hybrid(writer: Any) -> None:
    write_granite(writer)
    write_state_space(writer)
    writer.add_rope_scaling_finetuned(False)


def write_bamba(writer: Any) -> None:
    write_granite_hybrid(writer)
    writer.add_rope_scaling_finetuned(True)


def write_granite_experts(writer: Any) -> None:
    write_moe_granite(writer)
    writer.add_expert_shared_feed_forward_length(64)


def write_granite_hybrid_experts(writer: Any) -> None:
    write_granite_hybrid(writer)
    write_granite_experts(writer)


def write_nemotron(writer: Any) -> None:
    """Write a rotary size that is not a head's, as llama.cpp does, though nothing is rotated."""
    write_state_space(writer, groups=2)
    writer.add_rope_dimension_count(12)


def write_nemotron_moe(writer: Any) -> None:
    write_nemotron(writer)
    write_moe(writer)
    writer.add_expert_shared_feed_forward_length(48)
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_scale(2.5)
    writer.add_expert_weights_norm(True)
    writer.add_expert_group_count(1)
    writer.add_moe_latent_size(32)
    writer.add_nextn_predict_layers(1)
    writer.add_tensor("blk.4.nextn.enorm.weight", np.ones(64, np.float32))


def write_deepseek2(writer: Any) -> None:
    write_moe(writer)
    write_yarn(writer)
    writer.add_rope_scaling_yarn_log_mul(0.1 * 0.7)
    writer.add_rope_dimension_count(8)
    writer.add_kv_lora_rank(32)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_shared_count(2)
    writer.add_expert_weights_scale(1.5)
    writer.add_expert_group_count(2)
    writer.add_expert_group_used_count(1)


def write_deepseek2_of_2024(writer: Any) -> None:
    write_deepseek2(writer)
    writer.add_value_length(16)


def write_deepseek2_of_2025(writer: Any) -> None:
    """Write keys and values of one head, from which those of others are computed."""
    write_deepseek2(writer)
    writer.add_key_length(32 + 8)
    writer.add_value_length(32)
    writer.add_key_length_mla(40)
    writer.add_value_length_mla(16)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)


def write_ernie_moe(writer: Any) -> None:
    """Write a bias of the router, which mlx-lm leaves out."""
    write_moe(writer)
    writer.add_leading_dense_block_count(1)
    writer.add_interleave_moe_layer_step(1)
    writer.add_expert_shared_count(2)
    writer.add_tensor("blk.1.exp_probs_b.bias", np.ones(8, np.float32))


def write_hunyuan(writer: Any) -> None:
    writer.add_rope_freq_base(50000.0 * 50.0 ** (16 / 14))
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def write_ling(writer: Any) -> None:
    write_moe(writer)
    writer.add_leading_dense_block_count(0)
    writer.add_expert_shared_count(2)
    writer.add_expert_weights_scale(1.0)
    writer.add_expert_weights_norm(True)


def write_dots(writer: Any) -> None:
    write_moe(writer)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_shared_count(2)
    writer.add_expert_weights_scale(2.5)
    writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def write_jamba(writer: Any) -> None:
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(16)
    writer.add_ssm_inner_size(2 * 64)
    writer.add_ssm_time_step_rank(8)
    writer.add_expert_count(8)
    writer.add_expert_used_count(2)


def write_kimi_linear(writer: Any) -> None:
    write_moe(writer)
    writer.add_ssm_conv_kernel(4)
    writer.add_kda_head_dim(32)
    writer.add_rope_dimension_count(8)
    writer.add_kv_lora_rank(32)
    writer.add_key_length_mla(40)
    writer.add_value_length_mla(16)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_shared_count(2)
    writer.add_expert_weights_scale(2.5)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
