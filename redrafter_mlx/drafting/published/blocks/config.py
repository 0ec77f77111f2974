"""The configuration of a block drafter: DFlash, JetSpec and DSpark, in their packagings.

The authors of DFlash keep their keys in `dflash_config`, DeepSpec (DSpark) at the top level, and
speculators has the layers' keys in `transformer_layer_config`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import mlx.core as mx

from redrafter_mlx.config import MAX_BEAM_LENGTH
from redrafter_mlx.drafting.files.drafter_files import DrafterFiles, check_pair
from redrafter_mlx.drafting.files.recognition import OF_SPECULATORS
from redrafter_mlx.drafting.published.network_config import (
    NetworkConfig,
    check_layers,
    flattened,
    read_network,
    shape_of,
    stored_shapes,
)
from redrafter_mlx.errors import DamagedFileError
from redrafter_mlx.speculation.constants import iota
from redrafter_mlx.target_model.model import Target

_OF_OUTPUTS, _OF_INPUTS = "target_layer_ids", "aux_hidden_state_layer_ids"
"""Keys of layers whose outputs are read, and of speculators' layers whose inputs are read."""

_CAUSAL = ("causal", "causal_head", "dflash_query_causal", "is_causal")
"""Keys that say for all layers whether a block's rows attend to earlier rows alone."""

_WINDOW = 4096
"""Positions that a layer without a window attends to: with more, long texts were drafted worse
(2.0 tokens at 32,000 positions, and 2.6 with this window; mlx-dspark's change log)."""


class Sight(NamedTuple):
    """What the rows of a block attend to in one layer.

    causal: whether to the block's rows up to their own alone
    window: number of newest positions of the text, counted from their own
    """

    causal: bool
    window: int

    def of(self, mask: mx.array, positions: mx.array) -> mx.array:
        """Restrict a mask to what the rows at `positions` [B, n] attend to.

        The mask is [B, 1, n, extent], or [n, extent] if B = 1. After two positions, with a block of
        three rows and a window of 3, bidirectional and causal:

            1 1   1 1 1     1 1   1 0 0
            0 1   1 1 1     0 1   1 1 0
            0 0   1 1 1     0 0   1 1 1
        """
        B, extent = positions.shape[0], mask.shape[-1]
        own, column = positions[:, :, None], iota(extent)  # [B, n, 1]
        seen = mx.array(True)
        if self.causal:
            seen = column <= own
        if self.window < extent:
            seen = seen & ((column > own - self.window) | (column >= own[:, :1]))
        return mask & (seen if seen.ndim < 3 else seen[0] if B == 1 else seen[:, None])


@dataclass(frozen=True, kw_only=True)
class BlockConfig(NetworkConfig):
    """The configuration of one block drafter.

    rows:       number of rows of a block: the root, and mask tokens after it
    mask_token: the token of the rows after the root
    first_row:  the row that predicts the token after the root: 0, the root's own, or 1
    sights:     of each layer
    soft_cap:   of the logits; None for none
    input_scale, output_scale: factors of the token embeddings, besides the target's own, and of the
                logits
    """

    rows: int
    mask_token: int
    first_row: int
    sights: tuple[Sight, ...]
    soft_cap: float | None
    input_scale: float
    output_scale: float

    @property
    def drafts(self) -> int:
        """Maximum number of drafts after the root."""
        return self.rows - self.first_row

    @property
    def causal(self) -> bool:
        """Whether no row depends on later ones, so that those that are not needed can be left out.

        A bidirectional block keeps the size that it was trained with.
        """
        return all(sight.causal for sight in self.sights)


def read_block(
    files: DrafterFiles, target: Target, first_row: int, windows_causal: bool = True
) -> BlockConfig:
    """Read the configuration of a block drafter for this target, without its weights.

    first_row, windows_causal: the form's first row that predicts, and whether layers with a window
      have a causal block, where the files say nothing else

    Raises MismatchError, naming both sides, and DamagedFileError, naming the tensor or the key.
    """
    files = flattened(_without_targets_keys(files))
    width = shape_of(files, "fc.weight")[1]
    layers = _layers(files, target, width)
    names = stored_shapes(files)
    V = target.vocab_size
    copied = names.get("lm_head.weight", (V,))[0] == V
    common = read_network(files, target, layers, width, copied)
    rows = files.integer("block_size", maximum=MAX_BEAM_LENGTH)
    first_row = _first_row(files, rows, first_row)
    cap = files.config.get("final_logit_softcapping")
    return BlockConfig(
        **vars(common),
        rows=rows,
        mask_token=files.integer("mask_token_id", minimum=0, maximum=V - 1),
        first_row=first_row,
        sights=_sights(files, common.n_layers, windows_causal),
        soft_cap=None if cap in (None, 0) else files.number("final_logit_softcapping"),
        input_scale=files.number("input_embedding_scale", 1.0),
        output_scale=files.number("output_multiplier", 1.0),
    )


def _without_targets_keys(files: DrafterFiles) -> DrafterFiles:
    """Leave out keys that are not the drafter's: DeepSpec's config.json is a copy of the target's.

    Its layers attend to everything, and rotate as if there were no scaling.
    """
    if "dflash_config" in files.config or OF_SPECULATORS in files.config:
        return files
    config = {k: v for k, v in files.config.items() if k not in ("layer_types", "rope_scaling")}
    rope = config.pop("rope_parameters", None)
    if isinstance(rope, dict) and "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
    return replace(files, config=config)


def _layers(files: DrafterFiles, target: Target, width: int) -> tuple[int, ...]:
    """Return the target's layers whose inputs are read; without a list, evenly spread ones."""
    key = _OF_INPUTS if _OF_INPUTS in files.config else _OF_OUTPUTS
    count = max(width // target.hidden_size, 1)
    last = max(target.n_layers - 3, 1)
    spread = [round(1 + i * (last - 1) / max(count - 1, 1)) for i in range(count)]
    listed = files.config.get(key, spread)
    if not isinstance(listed, list) or not all(type(i) is int for i in listed) or not listed:
        raise files.bad_value(key, "a list of layers")
    if width % len(listed):
        raise DamagedFileError(
            f"{files.tensors.path}: tensor fc.weight has {width} columns, which {len(listed)} "
            f"layers of the target cannot fill"
        )
    check_pair(width // len(listed), target.hidden_size, "target hidden size")
    return check_layers([i + (key == _OF_OUTPUTS) for i in listed], target)


def _first_row(files: DrafterFiles, rows: int, otherwise: int) -> int:
    """Return the first row that predicts.

    speculators' files name the number of drafts or whether the root's row predicts; those that name
    neither are older, and it does not.
    """
    if OF_SPECULATORS in files.config:
        otherwise = 1
    proposal = files.config.get("speculators_config")
    methods = proposal.get("proposal_methods") if isinstance(proposal, dict) else None
    method = methods[0] if isinstance(methods, list) and methods else None
    drafts = method.get("speculative_tokens") if isinstance(method, dict) else None
    if isinstance(drafts, int) and 0 <= rows - drafts <= 1:
        return rows - drafts
    return 0 if files.flag("sample_from_anchor", otherwise == 0) else 1


def _sights(files: DrafterFiles, n_layers: int, windows_causal: bool) -> tuple[Sight, ...]:
    """Return what the rows attend to in each layer.

    Unless stated for all, only layers with a sliding window can be causal.
    """
    kinds = files.config.get("layer_types", ["full_attention"] * n_layers)
    if not isinstance(kinds, list) or len(kinds) < n_layers:
        raise files.bad_value("layer_types", f"a list of {n_layers} kinds")
    stated = next((files.flag(key, False) for key in _CAUSAL if key in files.config), None)
    alone = not files.flag("sliding_window_non_causal", not windows_causal)
    sliding = alone if stated is None else stated
    whole = Sight(bool(stated), files.integer("draft_window_size", _WINDOW))
    kinds = kinds[:n_layers]
    if "sliding_attention" not in kinds:
        return (whole,) * n_layers
    window = Sight(sliding, files.integer("sliding_window"))
    return tuple(window if kind == "sliding_attention" else whole for kind in kinds)


def other_readings(config: BlockConfig, last_layer: int) -> dict[str, BlockConfig]:
    """Return other readings of its files, by description; see calibration."""
    changed = {}
    for step, words in ((-1, "layers one earlier"), (1, "layers one later")):
        layers = tuple(layer + step for layer in config.layers)
        if layers[0] >= 0 and layers[-1] <= last_layer + 1:
            changed[words] = replace(config, layers=layers)
    if config.rope_scaling is not None:
        changed["no rotary scaling"] = replace(config, rope_scaling=None)
    changed["the other first row"] = replace(config, first_row=1 - config.first_row)
    return changed
