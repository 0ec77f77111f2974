"""Metadata of GGUF files, under llama.cpp's names, as keys of config.json.

Each function returns the keys that only its architecture has. No MLX is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from redrafter_mlx.errors import UnsupportedModelError
from redrafter_mlx.weights.gguf.keys import Keys

_SIGMOID = 2
"""llama.cpp's number of the function that gives the scores of experts."""

Settings = Callable[[Keys], Mapping[str, object]]
"""Return the keys of config.json that only this architecture has."""


def of_experts(keys: Keys) -> Mapping[str, object]:
    """Return the numbers of experts, under every name that mlx-lm's classes have for them."""
    if not keys.whole("expert_count", 0):
        return {}
    count, used = keys.whole("expert_count"), keys.whole("expert_used_count")
    of_all = keys.intermediate
    return {
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), count),
        "num_experts_per_tok": used,
        "moe_intermediate_size": keys.whole("expert_feed_forward_length", of_all // max(used, 1)),
        "shared_expert_intermediate_size": keys.whole("expert_shared_feed_forward_length", of_all),
        "first_k_dense_replace": keys.whole("leading_dense_block_count", 0),
        "n_group": keys.whole("expert_group_count", 1),
        "topk_group": keys.whole("expert_group_used_count", 1),
        "n_shared_experts": keys.whole("expert_shared_count", 0),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _window_list(keys: Keys, period: int) -> list[bool]:
    """Return whether each layer has a window; if the file does not tell, all but every P-th."""
    key = "attention.sliding_window_pattern"
    listed = keys.each(key)
    if listed is None:
        period = max(keys.whole(key, period), 1)
        return [(i + 1) % period != 0 for i in range(keys.layers)]
    return [bool(windowed) for windowed in listed]


def _window_period(keys: Keys, default: int) -> int:
    """Return P: all layers but every P-th have a window."""
    listed = _window_list(keys, default)
    if keys.each("attention.sliding_window_pattern") is None:
        return keys.whole("attention.sliding_window_pattern", default)
    period = listed.index(False) + 1 if False in listed else 0
    if not period or listed != [(i + 1) % period != 0 for i in range(len(listed))]:
        raise UnsupportedModelError(f"{keys.header.path}: layers with a window in no fixed pattern")
    return period


def _gemma_scale(keys: Keys, largest: int) -> float:
    """Return the square of what divides queries: in the largest model, it is not a head's size."""
    return keys.hidden / keys.heads if keys.layers == largest else float(keys.head_dim)


def gemma2(keys: Keys) -> Mapping[str, object]:
    return {
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _gemma_scale(keys, 46),
    }


def gemma3(keys: Keys) -> Mapping[str, object]:
    local = keys.number("rope.local.freq_base", 10000.0)  # Ollama's name of it
    return {
        "sliding_window": keys.whole("attention.sliding_window"),
        "sliding_window_pattern": _window_period(keys, 6),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", local),
        "query_pre_attn_scalar": _gemma_scale(keys, 62),
    }


def phi3(keys: Keys) -> Mapping[str, object]:
    return {
        "partial_rotary_factor": keys.rotary,
        "original_max_position_embeddings": keys.whole(
            "rope.scaling.original_context_length", keys.whole("context_length")
        ),
    }


def gpt_oss(keys: Keys) -> Mapping[str, object]:
    return {
        "intermediate_size": keys.whole("expert_feed_forward_length"),
        "sliding_window": keys.whole("attention.sliding_window"),
    }


def granite(keys: Keys) -> Mapping[str, object]:
    return {
        "attention_bias": False,
        "mlp_bias": False,
        "attention_multiplier": keys.number("attention.scale", keys.head_dim**-0.5),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
    }


def olmo3(keys: Keys) -> Mapping[str, object]:
    kinds = ("full_attention", "sliding_attention")
    return {
        "sliding_window": keys.whole("attention.sliding_window"),
        "layer_types": [kinds[windowed] for windowed in _window_list(keys, 4)],
    }


def exaone4(keys: Keys) -> Mapping[str, object]:
    window = keys.whole("attention.sliding_window", 0)
    pattern = "".join("GL"[windowed] for windowed in _window_list(keys, 4))
    return {
        "sliding_window": window or None,
        "sliding_window_pattern": pattern if window else None,
    }


def cohere(keys: Keys) -> Mapping[str, object]:
    return {
        "logit_scale": keys.number("logit_scale"),
        "use_qk_norm": keys.holds("attn_q_norm.weight"),
    }


def cohere2(keys: Keys) -> Mapping[str, object]:
    return {
        "logit_scale": keys.number("logit_scale"),
        "sliding_window": keys.whole("attention.sliding_window"),
        "sliding_window_pattern": _window_period(keys, 4),
    }


def glm4(keys: Keys) -> Mapping[str, object]:
    if keys.has("rope.dimension_sections"):  # its rows are in another order
        raise UnsupportedModelError(f"{keys.header.path}: GLM-4 that reads pictures is not read")
    return {
        "partial_rotary_factor": keys.rotary,
        "attention_bias": keys.holds("attn_q.bias"),
    }


def seed_oss(keys: Keys) -> Mapping[str, object]:
    return {"attention_bias": keys.holds("attn_q.bias")}


def ernie(keys: Keys) -> Mapping[str, object]:
    return {"use_bias": keys.holds("attn_q.bias")}


def glm4_moe(keys: Keys) -> Mapping[str, object]:
    return {**glm4(keys), "use_qk_norm": keys.holds("attn_q_norm.weight")}


def deepseek3(keys: Keys) -> Mapping[str, object]:
    if keys.whole("expert_gating_func", 1) != _SIGMOID:
        raise UnsupportedModelError(f"{keys.header.path}: DeepSeek V2 in GGUF is not read")
    rank, rotary = "attention.q_lora_rank", keys.whole("rope.dimension_count")
    return {
        "num_key_value_heads": keys.heads,
        "q_lora_rank": keys.whole(rank) if keys.has(rank) else None,
        "kv_lora_rank": keys.whole("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": keys.whole("attention.key_length_mla") - rotary,
        "v_head_dim": keys.whole("attention.value_length_mla"),
    }


def bailing_moe(keys: Keys) -> Mapping[str, object]:
    count = keys.whole("expert_shared_count", 0)
    shared = [
        t.shape[0] for n, t in keys.header.tensors.items() if n.endswith("ffn_up_shexp.weight")
    ]
    sigmoid = keys.whole("expert_gating_func", 1) == _SIGMOID
    return {
        "num_shared_experts": count,
        "moe_shared_expert_intermediate_size": max(shared, default=0) // max(count, 1),
        "use_qk_norm": True,
        "moe_router_enable_expert_bias": keys.holds("exp_probs_b.bias"),
        "score_function": "sigmoid" if sigmoid else "softmax",
        "partial_rotary_factor": keys.rotary,
    }


def minimax(keys: Keys) -> Mapping[str, object]:
    if keys.whole("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise UnsupportedModelError(f"{keys.header.path}: MiniMax M2 whose router is no sigmoid")
    return {
        "intermediate_size": keys.whole("expert_feed_forward_length"),
        "shared_intermediate_size": 0,
        "rotary_dim": keys.whole("rope.dimension_count", keys.head_dim),
    }


def ministral3(keys: Keys) -> Mapping[str, object]:
    return {
        "rope_parameters": {
            "rope_theta": keys.number("rope.freq_base"),
            "llama_4_scaling_beta": keys.number("attention.temperature_scale"),
        }
    }


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


def gemma4(keys: Keys) -> Mapping[str, object]:
    head_dim = keys.whole("attention.key_length_swa")
    if keys.whole("rope.dimension_count_swa", head_dim) != head_dim:
        raise UnsupportedModelError(f"{keys.header.path}: heads with a window, rotated in part")
    windowed = _window_list(keys, 6)
    kinds = ["sliding_attention" if window else "full_attention" for window in windowed]
    shared = max(keys.whole("attention.shared_kv_layers", 0), 0)
    whole = [i for i in range(keys.layers - shared) if not windowed[i]]
    kv_heads = keys.each("attention.head_count_kv") or [keys.kv_heads] * keys.layers
    heads = dict(zip(windowed, kv_heads, strict=False))
    embedded = keys.header.tensors.get("per_layer_token_embd.weight")
    sizes = {*(keys.each("feed_forward_length") or ())}
    cap = "final_logit_softcapping"
    return {
        "head_dim": head_dim,
        "global_head_dim": keys.head_dim,
        "num_key_value_heads": heads.get(True, keys.kv_heads),
        "num_global_key_value_heads": heads.get(False, keys.kv_heads),
        "attention_k_eq_v": not all(keys.holds(f"{i}.attn_v.weight") for i in whole),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": len(sizes) > 1,
        "hidden_size_per_layer_input": keys.whole("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": embedded.shape[0] if embedded else 0,
        "layer_types": kinds,
        "sliding_window": keys.whole("attention.sliding_window"),
        "final_logit_softcapping": keys.number(cap) if keys.has(cap) else None,
        "enable_moe_block": keys.holds("ffn_gate_inp.weight"),
        "top_k_experts": keys.whole("expert_used_count", 0),
        "rope_parameters": {
            "full_attention": {"rope_theta": keys.number("rope.freq_base")},
            "sliding_attention": {"rope_theta": keys.number("rope.freq_base_swa")},
        },
    }
