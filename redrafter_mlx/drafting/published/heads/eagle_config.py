"""The configuration of an EAGLE drafter: sizes from its tensors, switches from its config.json.

Published layouts: the authors' (`midlayer.*`), speculators' and DeepSpec's (`layers.0.*`), and that
of EAGLE-1 and 2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from redrafter_mlx.checks import shown
from redrafter_mlx.drafting.files.drafter_files import DrafterFiles, check_pair
from redrafter_mlx.drafting.files.recognition import CONFIG, OF_SPECULATORS
from redrafter_mlx.drafting.published.network_config import (
    NetworkConfig,
    check_layers,
    flattened,
    read_network,
    shape_of,
    stored_shapes,
)
from redrafter_mlx.errors import DamagedFileError, UnsupportedModelError
from redrafter_mlx.target_model.model import Target

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, kw_only=True)
class EagleConfig(NetworkConfig):
    """The configuration of one EAGLE drafter.

    layers:       () for EAGLE-1 and 2
    window:       number of newest positions that a row attends to; None for all
    norm_before_residual, norm_before_fc, fc_norm, norm_output: of EAGLE-3, see `DecoderLayer` and
                  `EagleThreeNetwork`
    """

    window: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


def read_eagle_one(files: DrafterFiles, target: Target) -> EagleConfig:
    """Read the configuration of an EAGLE-1 or 2 drafter; raises as `read_eagle_three`."""
    files = flattened(files)
    check_pair(shape_of(files, "fc.weight")[0], target.hidden_size, "hidden size")
    return _read(files, target, (), target.hidden_size)


def read_eagle_three(files: DrafterFiles, target: Target) -> EagleConfig:
    """Read the configuration of an EAGLE-3 drafter for this target, without its weights.

    Raises:
      MismatchError: naming both sides, if sizes, vocabularies or layers do not fit
      DamagedFileError: naming the tensor or the key that is missing or cannot be used
      UnsupportedModelError: naming what this drafter needs and this project does not implement
    """
    of_speculators = OF_SPECULATORS in files.config
    files = flattened(files)
    if not files.flag("use_aux_hidden_state", True):
        raise UnsupportedModelError(
            f"{files.folder / CONFIG}: use_aux_hidden_state is false; the EAGLE-3 drafters that "
            f"are supported read layers of the target"
        )
    layers = _layers(files, target)
    width = shape_of(files, "fc.weight")[1]
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


def _read(
    files: DrafterFiles, target: Target, layers: tuple[int, ...], context_size: int
) -> EagleConfig:
    """Read what both forms have in common."""
    partial = files.config.get("partial_rotary_factor")
    if partial not in (None, 1) and OF_SPECULATORS in files.config:  # others ignore it
        raise UnsupportedModelError(
            f"{files.folder / CONFIG}: partial_rotary_factor is {shown(partial)}; an EAGLE "
            f"drafter's rotary embedding has to rotate whole heads"
        )
    copied = "target_layer_ids" in files.config  # DeepSpec freezes a copy of the target's head
    common = read_network(files, target, layers, context_size, copied)
    return EagleConfig(**vars(common), window=_window(files, common.n_layers))


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
    return check_layers([i + 1 if of_outputs else i for i in listed], target)


def _window(files: DrafterFiles, n_layers: int) -> int | None:
    """Return the sliding window of all its layers; None if none has one."""
    kinds = files.config.get("layer_types")
    if kinds is None and files.flag("use_sliding_window", False):
        whole = files.integer("max_window_layers", 28, minimum=0)  # as in transformers
        kinds = ["full_attention" if i < whole else "sliding_attention" for i in range(n_layers)]
    if not isinstance(kinds, list) or "sliding_attention" not in kinds:
        return None
    if {*kinds} != {"sliding_attention"}:
        raise UnsupportedModelError(
            f"{files.folder / CONFIG}: layer_types is {kinds!r:.80}; an EAGLE drafter's layers "
            f"have to be of one kind"
        )
    return files.integer("sliding_window")
