"""Configuration of the model in a GGUF file, under the names of config.json."""

from __future__ import annotations

from redrafter_mlx.errors import DamagedFileError, UnsupportedModelError
from redrafter_mlx.weights.gguf.architectures.architecture import Architecture
from redrafter_mlx.weights.gguf.architectures.experts import of_experts
from redrafter_mlx.weights.gguf.architectures.table import ARCHITECTURES, VARIANTS
from redrafter_mlx.weights.gguf.header import GGUFHeader
from redrafter_mlx.weights.gguf.keys import Keys

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_EPSILONS = (
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps",
)  # fmt: skip
"""Names that mlx-lm's classes have for what norms add to a variance."""


def gguf_config(header: GGUFHeader) -> dict[str, object]:
    """Return what any file says of its sizes; None where it says nothing."""
    kind = header.metadata.get("general.architecture")
    names = {
        "num_hidden_layers": "block_count",
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "max_position_embeddings": "context_length",
        "num_experts": "expert_count",
        "linear_num_value_heads": "ssm.time_step_rank",
        "conv_L_cache": "shortconv.l_cache",
    }
    embedding = header.tensors.get(_EMBEDDING)
    return {
        **{ours: _largest(header.metadata.get(f"{kind}.{n}")) for ours, n in names.items()},
        "model_type": kind,
        "vocab_size": embedding.shape[0] if embedding else None,
        "tie_word_embeddings": _HEAD not in header.tensors,
    }


def _largest(value: object) -> object:
    """Return a number, and of numbers for each layer the largest."""
    numbers = [v for v in value if isinstance(v, int)] if isinstance(value, list) else []
    return max(numbers) if numbers else value


def architecture_of(header: GGUFHeader) -> Architecture:
    """Return the file's architecture; raises UnsupportedModelError for one that is not read."""
    kind = header.get("general.architecture", str)
    keys = Keys(header, kind)
    marked = [variant for variant, has in VARIANTS.items() if has(keys)]
    named = [f"{kind} with {variant}" for variant in marked]
    architecture = next((ARCHITECTURES[n] for n in (*named, kind) if n in ARCHITECTURES), None)
    if architecture is None:
        known = ", ".join(name for name in ARCHITECTURES if " with " not in name)
        raise unsupported(header, f"GGUF of architecture {kind:.80} is not read, only {known}")
    return architecture


def model_config(header: GGUFHeader, architecture: Architecture) -> dict[str, object]:
    """Return the configuration for mlx-lm's class, without a rope scaling.

    Raises:
      UnsupportedModelError: a setting that mlx-lm's class does not have
      DamagedFileError: an entry of the metadata is missing or contradicts the tensors
    """
    keys = Keys(header, header.get("general.architecture", str))
    layers, embedding = keys.layers, header.tensors.get(_EMBEDDING)
    if not 0 < layers <= len(header.tensors):
        raise DamagedFileError(f"{header.path}: {layers} layers, but {len(header.tensors)} tensors")
    if embedding is None:
        raise DamagedFileError(f"{header.path}: tensor {_EMBEDDING} is missing")
    rotary = keys.whole("rope.dimension_count", keys.head_dim)
    if rotary != keys.head_dim and not architecture.partial:
        what = f"rotary embedding of {rotary} of {keys.head_dim} dimensions is not read"
        raise unsupported(header, what)
    config = {
        "model_type": architecture.model_type,
        "hidden_size": keys.hidden,
        "num_hidden_layers": layers,
        "intermediate_size": keys.intermediate,
        "num_attention_heads": keys.heads,
        "num_key_value_heads": keys.kv_heads,
        "head_dim": keys.head_dim,
        **dict.fromkeys(_EPSILONS, keys.norm_epsilon),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": keys.whole("context_length"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_traditional": architecture.traditional,
        "tie_word_embeddings": _HEAD not in header.tensors,
    }
    return {**config, **of_experts(keys), **architecture.settings(keys)}


def unsupported(header: GGUFHeader, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{header.path}: {what}; give the model's safetensors folder or Hub repository instead"
    )
