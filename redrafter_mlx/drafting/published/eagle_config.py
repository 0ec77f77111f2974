"""The configuration of an EAGLE drafter: sizes from its tensors, switches from its config.json.

Published config.json files are often wrong about sizes (a head size of 80, with tensors of 128) and
always right about what no tensor shows, so tensors take precedence. Published layouts: the authors'
(`midlayer.*`), speculators' and DeepSpec's (`layers.0.*`), and that of EAGLE-1 and 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import mlx.nn as nn
from mlx_lm.models.rope_utils import initialize_rope

from redrafter_mlx.config import shown
from redrafter_mlx.drafting.drafter_files import DrafterFiles, check_pair
from redrafter_mlx.drafting.recognition import CONFIG, eagle_name
from redrafter_mlx.errors import DamagedFileError, MismatchError, UnsupportedModelError
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.weights.raw_model import top_level_rope

_SECTIONS = ("eagle_config", "transformer_layer_config", "model")
"""Keys of config.json whose values are objects with further keys."""

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"

_NOT_OF_THE_NETWORK = ("verifier_", "t2d", "d2t")
"""Name prefixes of the target's tensors and of vocabulary tables."""

ROPE_BASE = 10000.0
"""Rotary base if config.json has none: the authors' files for Llama 3.1 were trained with it."""


@dataclass(frozen=True)
class EagleConfig:
    """The configuration of one EAGLE drafter.

    stored:       names of its tensors, as its network calls them; an optional bias or norm exists
                  if its tensor does
    layers:       the target's layers whose inputs it reads, ascending; () for EAGLE-1 and 2, which
                  read the final norm's output
    context_size: C, size of the features that it reads at each position
    hidden_size:  H
    output_size:  V', number of outputs
    vocab_size:   V, of the target
    own_head:     whether it has an output layer of its own
    own_embedding: whether it has a token embedding of its own
    max_positions: used by rope scaling
    window:       number of newest positions that a row attends to; None for all
    norm_before_residual, norm_before_fc, fc_norm, norm_output: of EAGLE-3, see `DecoderLayer` and
                  `EagleThreeNetwork`
    """

    stored: frozenset[str]
    layers: tuple[int, ...]
    context_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_size: int
    n_layers: int
    output_size: int
    vocab_size: int
    own_head: bool
    own_embedding: bool
    norm_eps: float
    rope_base: float
    rope_scaling: Mapping[str, object] | None
    max_positions: int
    window: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

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


def of_network(name: str, config: EagleConfig) -> bool:
    """Whether a tensor belongs to the network, which may use the target's embedding instead."""
    shared = (name == "embed_tokens.weight" and not config.own_embedding) or (
        name == "lm_head.weight" and not config.own_head
    )
    return not shared and not name.startswith(_NOT_OF_THE_NETWORK)


def read_eagle_one(files: DrafterFiles, target: Target) -> EagleConfig:
    """Read the configuration of an EAGLE-1 or 2 drafter; raises as `read_eagle_three`."""
    files = _flattened(files)
    check_pair(_shape(files, "fc.weight")[0], target.hidden_size, "hidden size")
    return _read(files, target, (), target.hidden_size)


def read_eagle_three(files: DrafterFiles, target: Target) -> EagleConfig:
    """Read the configuration of an EAGLE-3 drafter for this target, without its weights.

    Raises:
      MismatchError: naming both sides, if sizes, vocabularies or layers do not fit
      DamagedFileError: naming the tensor or the key that is missing or cannot be used
      UnsupportedModelError: naming what this drafter needs and this project does not implement
    """
    of_speculators = "speculators_model_type" in files.config
    files = _flattened(files)
    if not files.flag("use_aux_hidden_state", True):
        raise UnsupportedModelError(
            f"{files.folder / CONFIG}: use_aux_hidden_state is false; the EAGLE-3 drafters that "
            f"are supported read layers of the target"
        )
    layers = _layers(files, target)
    width = _shape(files, "fc.weight")[1]
    if width % len(layers):
        raise DamagedFileError(
            f"{files.tensors.path}: tensor fc.weight has {width} columns, which {len(layers)} "
            f"layers of the target cannot fill"
        )
    check_pair(width // len(layers), target.hidden_size, "target hidden size")
    names = stored_shapes(files)
    return replace(
        _read(files, target, layers, width),
        norm_before_residual=files.flag("norm_before_residual", of_speculators),
        norm_before_fc=files.flag("norm_before_fc", "input_norm.weight" in names),
        fc_norm=files.flag("fc_norm", "fc_norm.0.weight" in names),
        norm_output=files.flag("norm_output", False),
    )


def _flattened(files: DrafterFiles) -> DrafterFiles:
    """Return the files with nested sections of config.json merged in and null keys left out."""
    config = dict(files.config)
    for section in _SECTIONS:
        nested = config.pop(section, None)
        config |= nested if isinstance(nested, dict) else {}
    return replace(files, config={key: value for key, value in config.items() if value is not None})


def _read(
    files: DrafterFiles, target: Target, layers: tuple[int, ...], context_size: int
) -> EagleConfig:
    """Read what both forms have in common."""
    vocab_size = files.integer("vocab_size", target.vocab_size)
    check_pair(vocab_size, target.vocab_size, "vocabulary")
    if files.config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(
            f"{files.folder / CONFIG}: hidden_act is {files.config['hidden_act']!r:.40}; an EAGLE "
            f"drafter's has to be 'silu'"
        )
    names = stored_shapes(files)
    hidden_size = _shape(files, "fc.weight")[0]
    heads, kv_heads, head_size = _heads(files)
    same_size = hidden_size == target.hidden_size
    copied = "target_layer_ids" in files.config  # DeepSpec freezes a copy of the target's head
    own_head = not same_size or ("lm_head.weight" in names and not copied)
    if not own_head and not copied and (names.get("d2t") or (vocab_size,))[0] < vocab_size:
        raise DamagedFileError(f"{files.tensors.path} lacks tensor lm_head.weight, and has d2t")
    trained = "embed_tokens.weight" in names and files.flag("embed_requires_grad", False)
    rope_base, rope_scaling = _rope(files)
    n_layers = len({name.split(".")[1] for name in names if name.startswith("layers.")})
    config = EagleConfig(
        stored=frozenset(names),
        layers=layers,
        context_size=context_size,
        hidden_size=hidden_size,
        intermediate_size=_shape(files, "layers.0.mlp.gate_proj.weight")[0],
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        n_layers=n_layers,
        output_size=_shape(files, "lm_head.weight")[0] if own_head else vocab_size,
        vocab_size=vocab_size,
        own_head=own_head,
        own_embedding=trained or not same_size,
        norm_eps=files.number("rms_norm_eps", 1e-6),
        rope_base=rope_base,
        rope_scaling=rope_scaling,
        max_positions=files.integer("max_position_embeddings", 2048),
        window=_window(files, n_layers),
    )
    _check_rope(files, config)
    return config


def _heads(files: DrafterFiles) -> tuple[int, int, int]:
    """Return query heads, key/value heads and head size, from tensors and the number of heads."""
    heads = files.integer("num_attention_heads")
    queries = _shape(files, "layers.0.self_attn.q_proj.weight")[0]
    keys = _shape(files, "layers.0.self_attn.k_proj.weight")[0]
    head_size = queries // heads
    kv_heads = keys // max(head_size, 1)
    if heads * head_size != queries or kv_heads * head_size != keys or heads % max(kv_heads, 1):
        raise DamagedFileError(
            f"{files.tensors.path}: {queries} rows of q_proj and {keys} of k_proj are not those of "
            f"num_attention_heads {heads}"
        )
    return heads, kv_heads, head_size


def _layers(files: DrafterFiles, target: Target) -> tuple[int, ...]:
    """Return the target's layers whose inputs are read.

    Listed ids are layers whose inputs are read. If the first id is 1, and in DeepSpec's files, they
    are layers whose outputs are read. Without a list, the authors' defaults are used: 2, n // 2 and
    n - 3.
    """
    n = target.n_layers
    key = "target_layer_ids" if "target_layer_ids" in files.config else _LAYER_IDS
    listed = files.config.get(key, [2, n // 2, n - 3])
    if not isinstance(listed, list) or not all(type(i) is int for i in listed) or not listed:
        raise files.bad_value(key, "a list of layers")
    of_outputs = key != _LAYER_IDS or listed[0] == 1
    layers = tuple(i + 1 if of_outputs else i for i in listed)
    if sorted({*layers}) != [*layers] or layers[0] < 0 or layers[-1] > n:
        raise MismatchError(
            f"the drafter reads the inputs of layers {[*layers]}, which have to rise; the target "
            f"has layers 0 to {n - 1}, and {n} is the input of its final norm"
        )
    return layers


def _window(files: DrafterFiles, n_layers: int) -> int | None:
    """Return the sliding window of all its layers; None if none has one."""
    kinds = files.config.get("layer_types")
    if kinds is None and files.flag("use_sliding_window", False):
        whole = files.integer("max_window_layers", 28, least=0)  # as in transformers
        kinds = ["full_attention" if i < whole else "sliding_attention" for i in range(n_layers)]
    if not isinstance(kinds, list) or "sliding_attention" not in kinds:
        return None
    if {*kinds} != {"sliding_attention"}:
        raise UnsupportedModelError(
            f"{files.folder / CONFIG}: layer_types is {kinds!r:.80}; an EAGLE drafter's layers "
            f"have to be of one kind"
        )
    return files.integer("sliding_window")


def _rope(files: DrafterFiles) -> tuple[float, Mapping[str, object] | None]:
    """Return the rotary base and scaling, under the key names of old or new files."""
    files = replace(files, config={**files.config, **top_level_rope(files.config)})
    scaling = files.config.get("rope_scaling")
    if scaling is not None and not isinstance(scaling, dict):
        raise files.bad_value("rope_scaling", "an object or null")
    partial = files.config.get("partial_rotary_factor")
    if partial not in (None, 1) and "speculators_model_type" in files.config:  # others ignore it
        raise UnsupportedModelError(
            f"{files.folder / CONFIG}: partial_rotary_factor is {shown(partial)}; an EAGLE "
            f"drafter's rotary embedding has to rotate whole heads"
        )
    plain = rope_kind(scaling) in (None, "default")
    return files.number("rope_theta", ROPE_BASE), None if plain else scaling


def rope_kind(scaling: Mapping[str, object] | None) -> object:
    """Return the kind of a rotary scaling, under the key name of old or new files."""
    return None if scaling is None else scaling.get("rope_type", scaling.get("type"))


def _check_rope(files: DrafterFiles, config: EagleConfig) -> None:
    try:
        rope_of(config)
    except Exception as error:  # mlx-lm checks nothing, and can raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DamagedFileError(
            f"{files.folder / CONFIG}: rotary embedding as it says cannot be made ({reason:.100})"
        ) from None


def rope_of(config: EagleConfig) -> nn.Module:
    """Return the rotary embedding of its attention."""
    return initialize_rope(
        config.head_size, config.rope_base, False, config.rope_scaling, config.max_positions
    )


def _shape(files: DrafterFiles, name: str) -> tuple[int, int]:
    """Return the shape of a matrix; raise DamagedFileError if it is missing or not a matrix."""
    shape = stored_shapes(files).get(name)
    if shape is None:
        raise DamagedFileError(f"{files.tensors.path} lacks tensor {name}")
    if len(shape) != 2 or min(shape) < 1:
        raise DamagedFileError(f"{files.tensors.path}: tensor {name} has shape {list(shape)}")
    return shape[0], shape[1]
