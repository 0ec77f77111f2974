"""Settings of models whose layers attend, and have one feed-forward network.

Each function returns the keys of config.json that only its architecture has, from the file's
metadata. No MLX is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping

from redrafter_mlx.errors import UnsupportedModelError
from redrafter_mlx.weights.gguf.keys import Keys


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


def phi3(keys: Keys) -> Mapping[str, object]:
    return {
        "partial_rotary_factor": keys.rotary,
        "original_max_position_embeddings": keys.whole(
            "rope.scaling.original_context_length", keys.whole("context_length")
        ),
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


def exaone(keys: Keys) -> Mapping[str, object]:
    return {"num_layers": keys.layers}


def hunyuan(keys: Keys) -> Mapping[str, object]:
    """Its rotary base is in the file with the scaling of NTK applied."""
    return {"use_qk_norm": keys.holds("attn_q_norm.weight"), "attention_bias": False}


def ernie(keys: Keys) -> Mapping[str, object]:
    return {"use_bias": keys.holds("attn_q.bias")}


def ministral3(keys: Keys) -> Mapping[str, object]:
    return {
        "rope_parameters": {
            "rope_theta": keys.number("rope.freq_base"),
            "llama_4_scaling_beta": keys.number("attention.temperature_scale"),
        }
    }
