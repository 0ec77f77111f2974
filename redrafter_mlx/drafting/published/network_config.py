"""What the networks of published drafters with decoder layers have in common: their configuration.

Published config.json files are often wrong about sizes (a head size of 80, with tensors of 128) and
always right about what no tensor shows, so tensors take precedence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.rope_utils import initialize_rope

from redrafter_mlx.drafting.files.drafter_files import DrafterFiles, check_pair
from redrafter_mlx.drafting.files.recognition import CONFIG
from redrafter_mlx.drafting.files.tensor_names import eagle_name
from redrafter_mlx.drafting.published.heads.feature_drafter import FeatureConfig
from redrafter_mlx.errors import DamagedFileError, MismatchError, UnsupportedModelError
from redrafter_mlx.speculation.draft_vocabulary import DraftVocabulary
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.weights.raw_model import top_level_rope

_SECTIONS = ("eagle_config", "dflash_config", "transformer_layer_config", "model")
"""Keys of config.json whose values are objects with further keys."""

_NOT_OF_THE_NETWORK = ("verifier_", "t2d", "d2t", "confidence_head.")
"""Name prefixes of the target's tensors, of vocabulary tables, and of a head that is not used."""

ROPE_BASE = 10000.0
"""Rotary base if config.json has none: the authors' files for Llama 3.1 were trained with it."""


@dataclass(frozen=True, kw_only=True)
class NetworkConfig(FeatureConfig):
    """The configuration of a drafter's decoder layers, and of what is around them.

    stored:       names of its tensors, as its network calls them; an optional bias or norm exists
                  if its tensor does
    hidden_size:  H
    output_size:  V', number of outputs
    vocab_size:   V, of the target
    max_positions: used by rope scaling
    rope_interleaved: whether neighbouring coordinates rotate together, not halves of a head
    """

    stored: frozenset[str]
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_size: int
    output_size: int
    vocab_size: int
    norm_eps: float
    rope_base: float
    max_positions: int
    rope_interleaved: bool = False

    def has(self, name: str) -> bool:
        """Whether there is a tensor with that name."""
        return name in self.stored

    @property
    def mlp_bias(self) -> bool:
        """Whether the MLPs have biases: all of their matrices, or none."""
        return self.has("layers.0.mlp.gate_proj.bias")


def stored_shapes(files: DrafterFiles) -> dict[str, tuple[int, ...]]:
    """Return tensor shapes by the network's own names, including t2d, d2t and the target's."""
    return {eagle_name(name): shape for name, shape in files.tensors.shapes.items()}


def of_network(name: str, config: NetworkConfig) -> bool:
    """Whether a tensor belongs to the network, which may use the target's embedding instead."""
    shared = (name == "embed_tokens.weight" and not config.own_embedding) or (
        name == "lm_head.weight" and not config.own_head
    )
    return not shared and not name.startswith(_NOT_OF_THE_NETWORK)


def flattened(files: DrafterFiles) -> DrafterFiles:
    """Return the files with nested sections of config.json merged in and null keys left out."""
    config = dict(files.config)
    for section in _SECTIONS:
        nested = config.pop(section, None)
        config |= nested if isinstance(nested, dict) else {}
    return replace(files, config={key: value for key, value in config.items() if value is not None})


def read_network(
    files: DrafterFiles,
    target: Target,
    layers: tuple[int, ...],
    context_size: int,
    copied_head: bool,
) -> NetworkConfig:
    """Read the configuration of these flattened files.

    copied_head: whether an output layer in them is a copy of the target's, which is used instead
    """
    vocab_size = files.integer("vocab_size", target.vocab_size)
    check_pair(vocab_size, target.vocab_size, "vocabulary")
    if files.config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(
            f"{files.folder / CONFIG}: hidden_act is {files.config['hidden_act']!r:.40}; a "
            f"drafter's has to be 'silu'"
        )
    names = stored_shapes(files)
    hidden_size = shape_of(files, "fc.weight")[0]
    heads, kv_heads, head_size = _heads(files)
    same_size = hidden_size == target.hidden_size
    own_head = not same_size or ("lm_head.weight" in names and not copied_head)
    if not own_head and not copied_head and (names.get("d2t") or (vocab_size,))[0] < vocab_size:
        raise DamagedFileError(f"{files.tensors.path} lacks tensor lm_head.weight, and has d2t")
    trained = "embed_tokens.weight" in names and files.flag("embed_requires_grad", False)
    rope_base, rope_scaling = _rope(files)
    n_layers = len({name.split(".")[1] for name in names if name.startswith("layers.")})
    config = NetworkConfig(
        stored=frozenset(names),
        layers=layers,
        context_size=context_size,
        hidden_size=hidden_size,
        intermediate_size=shape_of(files, "layers.0.mlp.gate_proj.weight")[0],
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        n_layers=n_layers,
        output_size=shape_of(files, "lm_head.weight")[0] if own_head else vocab_size,
        vocab_size=vocab_size,
        own_head=own_head,
        own_embedding=trained or not same_size,
        norm_eps=files.number("rms_norm_eps", 1e-6),
        rope_base=rope_base,
        rope_scaling=rope_scaling,
        max_positions=files.integer("max_position_embeddings", 2048),
        rope_interleaved=not files.flag("rope_is_neox_style", True),
    )
    _check_rope(files, config)
    return config


def check_layers(layers: Sequence[int], target: Target) -> tuple[int, ...]:
    """Return the layers whose inputs are read; raise MismatchError unless they rise and exist."""
    n = target.n_layers
    if sorted({*layers}) != [*layers] or layers[0] < 0 or layers[-1] > n:
        raise MismatchError(
            f"the drafter reads the inputs of layers {[*layers]}, which have to rise; the target "
            f"has layers 0 to {n - 1}, and {n} is the input of its final norm"
        )
    return tuple(layers)


def read_vocabulary(
    config: NetworkConfig, stored: Mapping[str, mx.array], files: DrafterFiles
) -> DraftVocabulary:
    """Return the tokens of its outputs: d2t holds each token's id minus its output index."""
    size, vocab_size = config.output_size, config.vocab_size
    if size == vocab_size:
        return DraftVocabulary(size, vocab_size)
    path = files.tensors.path
    if "d2t" not in stored:
        raise DamagedFileError(f"{path} lacks tensor d2t of shape [{size}]")
    offsets = np.array(stored["d2t"])
    if offsets.shape != (size,) or not np.issubdtype(offsets.dtype, np.integer):
        raise DamagedFileError(f"{path}: tensor d2t does not hold {size} integers")
    tokens = np.arange(size) + offsets
    if tokens.min() < 0 or tokens.max() >= vocab_size or len(np.unique(tokens)) < size:
        raise DamagedFileError(
            f"{path}: tensor d2t does not lead to different tokens below {vocab_size}"
        )
    return DraftVocabulary(size, vocab_size, mx.array(tokens.astype(np.int32)))


def _heads(files: DrafterFiles) -> tuple[int, int, int]:
    """Return query heads, key/value heads and head size, from tensors and the number of heads."""
    heads = files.integer("num_attention_heads")
    queries = shape_of(files, "layers.0.self_attn.q_proj.weight")[0]
    keys = shape_of(files, "layers.0.self_attn.k_proj.weight")[0]
    head_size = queries // heads
    kv_heads = keys // max(head_size, 1)
    if heads * head_size != queries or kv_heads * head_size != keys or heads % max(kv_heads, 1):
        raise DamagedFileError(
            f"{files.tensors.path}: {queries} rows of q_proj and {keys} of k_proj are not those of "
            f"num_attention_heads {heads}"
        )
    return heads, kv_heads, head_size


def _rope(files: DrafterFiles) -> tuple[float, Mapping[str, object] | None]:
    """Return the rotary base and scaling, under the key names of old or new files."""
    files = replace(files, config={**files.config, **top_level_rope(files.config)})
    scaling = files.config.get("rope_scaling")
    if scaling is not None and not isinstance(scaling, dict):
        raise files.bad_value("rope_scaling", "an object or null")
    plain = rope_kind(scaling) in (None, "default")
    return files.number("rope_theta", ROPE_BASE), None if plain else scaling


def rope_kind(scaling: Mapping[str, object] | None) -> object:
    """Return the kind of a rotary scaling, under the key name of old or new files."""
    return None if scaling is None else scaling.get("rope_type", scaling.get("type"))


def _check_rope(files: DrafterFiles, config: NetworkConfig) -> None:
    try:
        rope_of(config)
    except Exception as error:  # mlx-lm checks nothing, and can raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DamagedFileError(
            f"{files.folder / CONFIG}: rotary embedding as it says cannot be made ({reason:.100})"
        ) from None


def rope_of(config: NetworkConfig) -> nn.Module:
    """Return the rotary embedding of its attention."""
    return initialize_rope(
        config.head_size,
        config.rope_base,
        config.rope_interleaved,
        config.rope_scaling,
        config.max_positions,
    )


def shape_of(files: DrafterFiles, name: str) -> tuple[int, int]:
    """Return the shape of a matrix; raise DamagedFileError if it is missing or not a matrix."""
    shape = stored_shapes(files).get(name)
    if shape is None:
        raise DamagedFileError(f"{files.tensors.path} lacks tensor {name}")
    if len(shape) != 2 or min(shape) < 1:
        raise DamagedFileError(f"{files.tensors.path}: tensor {name} has shape {list(shape)}")
    return shape[0], shape[1]
