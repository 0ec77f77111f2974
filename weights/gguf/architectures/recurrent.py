"""Settings of models some of whose layers keep a recurrent state.

Each function returns the keys of config.json that only its architecture has, from the file's
metadata. No MLX is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping

from redrafter_mlx.errors import UnsupportedModelError
from redrafter_mlx.weights.gguf.architectures.attention import granite
from redrafter_mlx.weights.gguf.architectures.experts import sigmoid
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


def granite_hybrid(keys: Keys) -> Mapping[str, object]:
    """Granite 4; and mixtures with shared experts, which attend in all layers."""
    heads = keys.each("attention.head_count_kv")
    recurrent = {} if heads is None else _state_space(keys)
    return {
        **granite(keys),
        **{f"mamba_{name}": value for name, value in recurrent.items()},
        "mamba_proj_bias": False,
        "layer_types": ["attention" if some else "mamba" for some in heads or [1] * keys.layers],
        "position_embedding_type": "rope" if keys.flag("rope.scaling.finetuned", True) else "nope",
        "shared_intermediate_size": keys.whole("expert_shared_feed_forward_length", 0),
    }


def nemotron_h(keys: Keys) -> Mapping[str, object]:
    """Nemotron-H: each layer has keys and values, or a network, or else a state."""
    state, experts = _state_space(keys), keys.holds("ffn_gate_inp.weight")
    heads, units = (
        keys.each(key) or [0] * keys.layers for key in ("attention.head_count_kv", _UNITS)
    )
    kinds = zip(heads[: keys.layers], units, strict=False)
    latent = "moe_latent_size"
    return {
        "hybrid_override_pattern": [
            "*" if some else "M" if not size else "E" if experts else "-" for some, size in kinds
        ],
        "mamba_num_heads": state["n_heads"],
        "mamba_head_dim": state["d_head"],
        "ssm_state_size": state["d_state"],
        "conv_kernel": state["d_conv"],
        "n_groups": state["n_groups"],
        "use_conv_bias": state["conv_bias"],
        "use_bias": False,
        "mamba_proj_bias": False,
        "attention_bias": keys.holds("attn_q.bias"),
        "mlp_bias": keys.holds("ffn_up.bias"),
        "moe_shared_expert_intermediate_size": keys.whole("expert_shared_feed_forward_length", 0),
        "moe_latent_size": keys.whole(latent) if keys.has(latent) else None,
    }


_UNITS = "feed_forward_length"


def falcon_h1(keys: Keys) -> Mapping[str, object]:
    """Falcon-H1, whose multipliers are applied to a file's weights.

    Raises UnsupportedModelError if the head is the embedding, as their multipliers differ.
    """
    if "output.weight" not in keys.header.tensors:
        what = "Falcon-H1 whose head is its embedding, by a factor that no file has, is not read"
        raise UnsupportedModelError(f"{keys.header.path}: {what}")
    normed = keys.holds("ssm_norm.weight")
    state = _state_space(keys)
    if normed and state["n_groups"] != 1:
        what = "Falcon-H1 with norms of groups of heads is not read"
        raise UnsupportedModelError(f"{keys.header.path}: {what}")
    return {
        **{f"mamba_{name}": value for name, value in state.items()},
        "mamba_d_ssm": keys.whole("ssm.inner_size"),
        "mamba_rms_norm": normed,
        "mamba_norm_before_gate": False,
    }


def jamba(keys: Keys) -> Mapping[str, object]:
    """Jamba, whose mixtures of experts take turns with networks.

    Raises UnsupportedModelError if they do not.
    """
    heads = keys.each("attention.head_count_kv") or [keys.kv_heads] * keys.layers
    sparse = [f"blk.{i}.ffn_gate_inp.weight" in keys.header.tensors for i in range(keys.layers)]
    first = sparse.index(True) if any(sparse) else 0
    period = sparse.index(True, first + 1) - first if sum(sparse) > 1 else max(keys.layers, 1)
    if any(sparse) and sparse != [i % period == first % period for i in range(keys.layers)]:
        raise UnsupportedModelError(f"{keys.header.path}: Jamba with experts in no fixed period")
    return {
        "attn_layer_offset": 0,
        "attn_layer_period": 1,
        "layers_block_type": ["attention" if some else "mamba" for some in heads],
        "expert_layer_period": period,
        "expert_layer_offset": -first % period,  # mlx-lm adds it to a layer's number
        "num_experts": keys.whole("expert_count", 0) if any(sparse) else 1,
        "num_experts_per_tok": keys.whole("expert_used_count", 1),
        "mamba_d_conv": keys.whole("ssm.conv_kernel"),
        "mamba_d_state": keys.whole("ssm.state_size"),
        "mamba_expand": keys.whole("ssm.inner_size") // max(keys.hidden, 1),
        "mamba_dt_rank": keys.whole("ssm.time_step_rank"),
        "mamba_proj_bias": False,
        "mamba_conv_bias": keys.holds("ssm_conv1d.bias"),
    }


def kimi_linear(keys: Keys) -> Mapping[str, object]:
    heads = keys.each("attention.head_count_kv") or [1] * keys.layers
    rotary = keys.whole("rope.dimension_count")
    return {
        "linear_attn_config": {
            "kda_layers": [i + 1 for i, some in enumerate(heads) if not some],
            "num_heads": keys.heads,
            "head_dim": keys.whole("kda.head_dim"),
            "short_conv_kernel_size": keys.whole("ssm.conv_kernel"),
        },
        "model_max_length": keys.whole("context_length"),
        "num_key_value_heads": keys.heads,
        "kv_lora_rank": keys.whole("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": keys.whole("attention.key_length_mla") - rotary,
        "v_head_dim": keys.whole("attention.value_length_mla"),
        "mla_use_nope": True,
        "num_experts": keys.whole("expert_count", 0),
        "num_experts_per_token": keys.whole("expert_used_count", 1),
        "num_shared_experts": keys.whole("expert_shared_count", 0),
        "num_expert_group": keys.whole("expert_group_count", 1),
        "moe_router_activation_func": "sigmoid" if sigmoid(keys) else "softmax",
        "moe_renormalize": keys.flag("expert_weights_norm", True),
    }


def _state_space(keys: Keys) -> Mapping[str, object]:
    """Return sizes of Mamba 2's layers."""
    heads = keys.whole("ssm.time_step_rank")
    return {
        "n_heads": heads,
        "d_head": keys.whole("ssm.inner_size") // max(heads, 1),
        "d_state": keys.whole("ssm.state_size"),
        "d_conv": keys.whole("ssm.conv_kernel"),
        "n_groups": keys.whole("ssm.group_count"),
        "conv_bias": keys.holds("ssm_conv1d.bias"),
    }
