"""Sizes of tiny models with latent attention, and with an indexer that chooses keys."""

from __future__ import annotations

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LATENT: dict[str, object] = {
    "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": None, "rope_scaling": YARN,
}  # fmt: skip
SPARSE: dict[str, object] = {
    **LATENT, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 6, "n_shared_experts": None,
    "moe_intermediate_size": 32, "routed_scaling_factor": 1.0, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 1, "moe_layer_freq": 1, "first_k_dense_replace": 0,
    "attention_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rope_scaling": None,
}  # fmt: skip
