"""Settings of mixtures of experts.

Each function returns the keys of config.json that only its architecture has, from the file's
metadata. No MLX is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping

from redrafter_mlx.errors import UnsupportedModelError
from redrafter_mlx.weights.gguf.architectures.attention import glm4
from redrafter_mlx.weights.gguf.keys import Keys

_SIGMOID = 2
"""llama.cpp's number of the function that gives the scores of experts; softmax has 1."""


def sigmoid(keys: Keys) -> bool:
    """Whether scores of experts are sigmoids."""
    return keys.whole("expert_gating_func", 1) == _SIGMOID


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


def gpt_oss(keys: Keys) -> Mapping[str, object]:
    return {
        "intermediate_size": keys.whole("expert_feed_forward_length"),
        "sliding_window": keys.whole("attention.sliding_window"),
    }


def glm4_moe(keys: Keys) -> Mapping[str, object]:
    return {**glm4(keys), "use_qk_norm": keys.holds("attn_q_norm.weight")}


def deepseek3(keys: Keys) -> Mapping[str, object]:
    rank, rotary = "attention.q_lora_rank", keys.whole("rope.dimension_count")
    return {
        "num_key_value_heads": keys.heads,
        "q_lora_rank": keys.whole(rank) if keys.has(rank) else None,
        "kv_lora_rank": keys.whole("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": _length(keys, "key") - rotary,
        "v_head_dim": _length(keys, "value"),
    }


def _length(keys: Keys, of: str) -> int:
    """Return the size of a head's keys or values; files until April 2025 have no other."""
    mla = f"attention.{of}_length_mla"
    return keys.whole(mla if keys.has(mla) else f"attention.{of}_length")


def deepseek2(keys: Keys) -> Mapping[str, object]:
    """DeepSeek V2; its large models choose among 8 groups of experts, which few files tell."""
    if keys.flag("expert_weights_norm", False) or keys.has("attention.temperature_scale"):
        what = "deepseek2 with a softmax that is no DeepSeek V2 is not read"
        raise UnsupportedModelError(f"{keys.header.path}: {what}")
    groups, used = (8, 3) if keys.whole("expert_count", 0) == 160 else (1, 1)
    groups = keys.whole("expert_group_count", groups)
    return {
        **deepseek3(keys),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "n_group": groups,
        "topk_group": keys.whole("expert_group_used_count", used),
        "rope_scaling": {"factor": 1.0},
    }


def dots(keys: Keys) -> Mapping[str, object]:
    if not sigmoid(keys):
        raise UnsupportedModelError(f"{keys.header.path}: dots1 whose router is no sigmoid")
    return {}


def ernie_moe(keys: Keys) -> Mapping[str, object]:
    return {
        "use_bias": False,
        "moe_num_experts": keys.whole("expert_count"),
        "moe_k": keys.whole("expert_used_count"),
        "moe_num_shared_experts": keys.whole("expert_shared_count", 0),
        "moe_layer_start_index": keys.whole("leading_dense_block_count", 0),
        "moe_layer_interval": max(keys.whole("interleave_moe_layer_step", 1), 1),
    }


def bailing_moe(keys: Keys) -> Mapping[str, object]:
    count = keys.whole("expert_shared_count", 0)
    shared = [
        t.shape[0] for n, t in keys.header.tensors.items() if n.endswith("ffn_up_shexp.weight")
    ]
    return {
        "num_shared_experts": count,
        "moe_shared_expert_intermediate_size": max(shared, default=0) // max(count, 1),
        "use_qk_norm": keys.holds("attn_q_norm.weight"),
        "moe_router_enable_expert_bias": keys.holds("exp_probs_b.bias"),
        "score_function": "sigmoid" if sigmoid(keys) else "softmax",
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
