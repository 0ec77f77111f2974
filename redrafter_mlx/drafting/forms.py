"""The published forms of drafters, and loading a folder as a drafter of the right form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.drafting.checkpoint import RECURRENT
from redrafter_mlx.drafting.drafter_files import (
    CONFIG,
    DrafterFiles,
    Form,
    check_trained_for,
    open_files,
)
from redrafter_mlx.drafting.interface import Drafter
from redrafter_mlx.drafting.level_drafter import LevelDrafter
from redrafter_mlx.drafting.published.calibration import calibrated
from redrafter_mlx.drafting.published.eagle import EAGLE, EAGLE3
from redrafter_mlx.drafting.published.medusa import MEDUSA, own_names
from redrafter_mlx.drafting.published.mlp_speculator import MLP_SPECULATOR
from redrafter_mlx.errors import DamagedFileError, UnsupportedModelError
from redrafter_mlx.runtime.json_file import read_object
from redrafter_mlx.target.model import Target
from redrafter_mlx.weights.files.names import MODEL_WEIGHTS

FORMS: tuple[Form, ...] = (RECURRENT, EAGLE3, EAGLE, MEDUSA, MLP_SPECULATOR)
"""In the order in which they are tried."""

_IN_CONFIG = {
    "markov_rank": "DSpark",
    "dflash_config": "DFlash",
    "hydra_num_heads": "Hydra",
    "ptd_token_id": "P-EAGLE",
}
"""Keys of config.json that only unsupported forms have."""

_OF_SPECULATORS = {"dflash": "DFlash", "dspark": "DSpark", "peagle": "P-EAGLE"}
"""The same by `speculators_model_type`."""

_QUANTISED = (".scales", ".weight_scale", ".weight_scale_inv", ".absmax")
"""Ends of the names of tensors that come with quantised weights, in MLX's and other formats."""

_KANGAROO = {"norm.weight", "layers.0.self_attn.q_proj.weight"}
"""Tensors of a Kangaroo drafter: only a decoder layer and a norm, which continue from one of the
target's first layers."""


@dataclass(frozen=True)
class DrafterFolder:
    """A drafter on disk, which is loaded once its target is known.

    target_name, target_fingerprint: of the target that it will draft for, if known
    bits, asked: as in DrafterFiles
    """

    path: Path
    target_name: str | None = None
    target_fingerprint: str | None = None
    bits: int | None = None
    asked: bool = True

    def bind(self, target: Target, tokenizer: TokenizerWrapper) -> Drafter:
        """Load the drafter, evaluated, in the target's arithmetic; errors as in `Form.load`.

        If the target's fingerprint is known, the drafter is calibrated.
        """
        files = open_files(self.path, self.bits, self.asked)
        drafter: Drafter = self._load(files, target)
        if self.target_fingerprint is not None:
            config = json.dumps(files.config, sort_keys=True)
            key = f"{self.target_fingerprint} {target.dtype} {self.bits} {config}"
            drafter = calibrated(drafter, target, tokenizer, files.tensors, key)
        drafter.folder = self.path
        return drafter

    def load(self, target: Target) -> LevelDrafter:
        """Load the drafter exactly as its files describe it, without calibration."""
        return self._load(open_files(self.path, self.bits, self.asked), target)

    def _load(self, files: DrafterFiles, target: Target) -> LevelDrafter:
        check_trained_for(files.config, self.path, self.target_name, self.target_fingerprint)
        return find_form(files).load(files, target)


def find_form(files: DrafterFiles) -> Form:
    """Return the form of a drafter's files.

    Raises UnsupportedModelError, naming what was found and what is supported.
    """
    _refuse(_unsupported_form(files), files.folder)
    for form in FORMS:
        if form.recognises(files):
            _check_not_quantised(files, form)
            return form
    found = ", ".join(sorted(files.tensors.shapes)[:3])
    raise UnsupportedModelError(
        f"{files.folder} holds no drafter of a known form (its tensors: {found:.200}, ...); "
        f"supported are {_supported()}"
    )


def check_form(config: Mapping[str, object], folder: Path) -> None:
    """Raise UnsupportedModelError if a config.json is that of an unsupported form of drafter."""
    _refuse(_unsupported_config(config), folder)


def _refuse(unsupported: str | None, folder: Path) -> None:
    if unsupported is not None:
        raise UnsupportedModelError(
            f"{folder} is a {unsupported} drafter, which is not supported; "
            f"supported are {_supported()}"
        )


def _supported() -> str:
    return ", ".join(form.name for form in FORMS)


def _unsupported_form(files: DrafterFiles) -> str | None:
    """Return the name of a known but unsupported form, recognised by its authors' own files."""
    names = files.tensors.shapes
    if any(name.startswith("markov_") for name in names):
        return "DSpark"
    if "hidden_norm.weight" in names:
        return "DFlash"
    if any(name.startswith("hydra") for name in names):
        return "Hydra"
    if any(name.removeprefix("model.") == "mask_hidden" for name in names):
        return "P-EAGLE"
    if names.keys() >= _KANGAROO and not {"fc.weight", "embed_tokens.weight"} & names.keys():
        return "Kangaroo"
    return _unsupported_config(files.config)


def _unsupported_config(config: Mapping[str, object]) -> str | None:
    """Return the name of a known but unsupported form, recognised by config.json alone."""
    named = _OF_SPECULATORS.get(str(config.get("speculators_model_type")))
    return named or next((form for key, form in _IN_CONFIG.items() if key in config), None)


def _check_not_quantised(files: DrafterFiles, form: Form) -> None:
    """Raise UnsupportedModelError, naming a tensor, if the drafter's weights are quantised.

    Of a whole model with Medusa heads, only the heads are looked at.
    """
    names = files.tensors.shapes if form != MEDUSA else own_names(files)
    quantised = next((name for name in names if name.endswith(_QUANTISED)), None)
    if quantised is not None:
        raise UnsupportedModelError(
            f"{files.folder}: its weights are quantised already (tensor {quantised:.80}); give the "
            f"drafter's 16-bit files; --drafter-bits quantises them at loading"
        )


def holds_drafter(folder: Path) -> bool:
    """Whether a folder holds a drafter rather than a language model.

    A folder without a readable config is treated as a drafter's; `open_files` then reports what it
    lacks.
    """
    try:
        config = read_object(folder / CONFIG)
    except (FileNotFoundError, DamagedFileError):
        return True
    # Models that also read pictures describe their language model in `text_config`.
    described = {"num_hidden_layers", "text_config"} & config.keys()
    if not described or "exit_dim" in config:
        return True
    try:
        files = open_files(folder)
    except DamagedFileError:  # possible model weights are left to the model loader
        return not any(folder.glob(MODEL_WEIGHTS))
    return is_drafter(files)


def is_drafter(files: DrafterFiles) -> bool:
    """Whether files are a drafter's of a known form, supported or not."""
    return _unsupported_form(files) is not None or any(f.recognises(files) for f in FORMS)
