"""EAGLE-3 drafters as vLLM's `speculators` stores them, which vLLM and this project load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx

from redrafter_mlx.drafting.files.drafter_files import parameters_of, write_drafter
from redrafter_mlx.drafting.published.heads.eagle_config import EagleConfig
from redrafter_mlx.drafting.published.heads.eagle_network import EagleNetwork
from redrafter_mlx.drafting.published.network_config import NetworkConfig
from redrafter_mlx.speculation.draft_vocabulary import DraftVocabulary

LAYER_CONFIG = "transformer_layer_config"
"""Key of config.json that holds the decoder layer's keys."""


def save_eagle(
    network: EagleNetwork,
    vocabulary: DraftVocabulary,
    folder: Path,
    draft_length: int,
    record: Mapping[str, object],
) -> None:
    """Write a drafter in float16; its token embedding is the target's.

    draft_length: number of successive drafts that `speculators` makes by default
    record:       further keys of config.json
    """
    tensors = parameters_of(network) | vocabulary_tables(vocabulary)
    target = record.get("target")
    proposal = proposing("eagle3", draft_length, target)
    config = {**speculators_config(network.config), "speculators_config": proposal, **record}
    write_drafter(folder, tensors, config, mx.float16)


def vocabulary_tables(vocabulary: DraftVocabulary) -> dict[str, mx.array]:
    """Return the tables of a reduced vocabulary, as `speculators` stores them; {} for a whole."""
    if vocabulary.tokens is None:
        return {}
    tokens = vocabulary.tokens.astype(mx.int64)
    offsets = tokens - mx.arange(vocabulary.size, dtype=mx.int64)
    return {"d2t": offsets, "t2d": vocabulary.index() >= 0}


def proposing(algorithm: str, drafts: int, target: object) -> dict[str, object]:
    """Return how `speculators` drafts by default, and for which target."""
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafts}],
        "verifier": {"name_or_path": target, "architectures": []},
    }


def speculators_config(config: EagleConfig) -> dict[str, object]:
    """Return the configuration in the layout of `Eagle3SpeculatorConfig`."""
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config.output_size,
        "eagle_aux_hidden_state_layer_ids": [*config.layers],
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "embed_requires_grad": False,
        LAYER_CONFIG: layer_config(config) | _windows(config),
    }


def layer_config(config: NetworkConfig) -> dict[str, object]:
    """Return the keys of a drafter's decoder layers."""
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "max_position_embeddings": config.max_positions,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


def _windows(config: EagleConfig) -> dict[str, object]:
    if config.window is None:
        return {}
    return {
        "layer_types": ["sliding_attention"] * config.n_layers,
        "sliding_window": config.window,
    }
