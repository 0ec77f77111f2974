"""Settings of models some of whose layers keep a recurrent state.

Each function returns the keys of config.json that only its architecture has, from the file's
metadata. No MLX is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping

from redrafter_mlx.weights.gguf.keys import Keys


def lfm2(keys: Keys) -> Mapping[str, object]:
    heads = keys.each("attention.head_count_kv") or [keys.kv_heads] * keys.layers
    return {
        "layer_types": ["full_attention" if some else "conv" for some in heads],
        "conv_L_cache": keys.whole("shortconv.l_cache"),
        "conv_bias": keys.holds("shortconv.conv.bias"),
        "block_dim": keys.hidden,
        "block_multiple_of": 1,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "use_expert_bias": keys.holds("exp_probs_b.bias"),
        "num_dense_layers": keys.whole("leading_dense_block_count", 0),
    }


def qwen3_5(keys: Keys) -> Mapping[str, object]:
    values = keys.whole("ssm.time_step_rank")
    return {
        "full_attention_interval": keys.whole("full_attention_interval", 4),
        "linear_conv_kernel_dim": keys.whole("ssm.conv_kernel"),
        "linear_key_head_dim": keys.whole("ssm.state_size"),
        "linear_num_key_heads": keys.whole("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_value_head_dim": keys.whole("ssm.inner_size") // max(values, 1),
        "rope_parameters": {
            "type": "default",
            "rope_theta": keys.number("rope.freq_base"),
            "partial_rotary_factor": keys.rotary,
        },
    }
