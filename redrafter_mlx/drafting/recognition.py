"""Which form of drafter a folder holds, by its config.json and the names of its tensors.

A `config.json` often names `LlamaForCausalLM` regardless of the contents, so the names decide. No
MLX is imported, so that listing drafters takes no time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from redrafter_mlx.errors import DamagedFileError, ModelNotFoundError, UnsupportedModelError
from redrafter_mlx.runtime.json_file import read_object
from redrafter_mlx.weights.files.names import MODEL_WEIGHTS
from redrafter_mlx.weights.files.tensors import open_tensors

CONFIG = "config.json"
RECURRENT, EAGLE3, EAGLE = "ReDrafter", "EAGLE-3", "EAGLE"
MEDUSA, MLP_SPECULATOR = "Medusa", "MLP speculator"

Config = Mapping[str, object]
Names = Collection[str]

IN_MEDUSA_MODEL = re.compile(r"^medusa_heads?\.")
"""Prefix of the heads' names in a Medusa-2 model, whose files hold the trunk's tensors too."""

SPECULATOR_PREFIX = "speculator."
"""Prefix of an MLP speculator's tensors in files for transformers."""

_MEDUSA_BLOCK = re.compile(
    r"(heads\.\d+\.blocks\.\d+\..*|\d+\.\d+\.linear\.(weight|bias)"
    r"|blocks\.\d+\.layers\.\d+\.(weight|bias))"
)
"""A residual block's tensor in our names, the authors' and vLLM's."""

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


def read_drafter_config(folder: str | Path) -> dict[str, object]:
    """Read a drafter's config.json; raises ModelNotFoundError or DamagedFileError in one line."""
    path = Path(folder) / CONFIG
    if not os.path.isdir(folder):
        raise ModelNotFoundError(f"no drafter at {folder}; give a folder that holds {CONFIG}")
    try:
        return read_object(path)
    except FileNotFoundError:
        raise ModelNotFoundError(f"{path} is missing; a drafter's folder holds {CONFIG}") from None


def form_in(folder: Path) -> str:
    """Return the form of the drafter in a folder; raises as `form_of`, and DamagedFileError."""
    return form_of(folder, read_drafter_config(folder), open_tensors(folder).shapes)


def form_of(folder: Path, config: Config, names: Names) -> str:
    """Return the form of a drafter's files.

    Raises UnsupportedModelError, naming what was found and what is supported.
    """
    _refuse(_unsupported(config, names), folder)
    form = _known(config, names)
    if form is None:
        found = ", ".join(sorted(names)[:3])
        raise UnsupportedModelError(
            f"{folder} holds no drafter of a known form (its tensors: {found:.200}, ...); "
            f"supported are {', '.join(_RECOGNISES)}"
        )
    if form == MEDUSA:  # of a whole model, only the heads are looked at
        names = [name for name in names if IN_MEDUSA_MODEL.match(name)] or names
    quantised = next((name for name in names if name.endswith(_QUANTISED)), None)
    if quantised is not None:
        raise UnsupportedModelError(
            f"{folder}: its weights are quantised already (tensor {quantised:.80}); give the "
            f"drafter's 16-bit files; --drafter-bits quantises them at loading"
        )
    return form


def check_form(config: Config, folder: Path) -> None:
    """Raise UnsupportedModelError if a config.json is that of an unsupported form of drafter."""
    _refuse(_unsupported_config(config), folder)


def is_drafter(config: Config, names: Names) -> bool:
    """Whether files are a drafter's of a known form, supported or not."""
    return _unsupported(config, names) is not None or _known(config, names) is not None


def holds_drafter(folder: Path) -> bool:
    """Whether a folder holds a drafter rather than a language model.

    A folder without a readable config is treated as a drafter's; opening it reports what it lacks.
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
        names = open_tensors(folder).shapes
    except DamagedFileError:  # possible model weights are left to the model loader
        return not any(folder.glob(MODEL_WEIGHTS))
    return is_drafter(config, names)


def _is_recurrent(config: Config, names: Names) -> bool:
    return "exit_dim" in config or "rnn_u.weight" in names


def _is_eagle_three(config: Config, names: Names) -> bool:
    kind = config.get("speculators_model_type", "eagle3")  # P-EAGLE's tensors look the same
    own = _eagle_names(names)
    return "layers.0.hidden_norm.weight" in own and "fc.weight" in own and kind == "eagle3"


def _is_eagle_one(_: Config, names: Names) -> bool:
    """Whether the files are an EAGLE-1 or EAGLE-2 drafter's; their networks are the same."""
    own = _eagle_names(names)
    norms = {"norm.weight", "layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight"}
    return {"layers.0.self_attn.q_proj.weight", "fc.weight"} <= own and not norms & own


def _eagle_names(names: Names) -> set[str]:
    return {eagle_name(name) for name in names}


def eagle_name(name: str) -> str:
    """Return the network's own name for a tensor of an EAGLE drafter's files."""
    name = name.removeprefix("model.")
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def _is_medusa(_: Config, names: Names) -> bool:
    return any(_MEDUSA_BLOCK.fullmatch(IN_MEDUSA_MODEL.sub("", name)) for name in names)


def _is_speculator(_: Config, names: Names) -> bool:
    own = {name.removeprefix(SPECULATOR_PREFIX) for name in names}
    return {"emb.0.weight", "proj.0.weight", "head.0.weight"} <= own


_RECOGNISES: dict[str, Callable[[Config, Names], bool]] = {
    RECURRENT: _is_recurrent,
    EAGLE3: _is_eagle_three,
    EAGLE: _is_eagle_one,
    MEDUSA: _is_medusa,
    MLP_SPECULATOR: _is_speculator,
}
"""Whether files are of a supported form, in the order in which forms are tried."""


def _known(config: Config, names: Names) -> str | None:
    return next((form for form, fits in _RECOGNISES.items() if fits(config, names)), None)


def _unsupported(config: Config, names: Names) -> str | None:
    """Return the name of a known but unsupported form, recognised by its authors' own files."""
    if any(name.startswith("markov_") for name in names):
        return "DSpark"
    if "hidden_norm.weight" in names:
        return "DFlash"
    if any(name.startswith("hydra") for name in names):
        return "Hydra"
    if any(name.removeprefix("model.") == "mask_hidden" for name in names):
        return "P-EAGLE"
    if {*names} >= _KANGAROO and not {"fc.weight", "embed_tokens.weight"} & {*names}:
        return "Kangaroo"
    return _unsupported_config(config)


def _unsupported_config(config: Config) -> str | None:
    """Return the name of a known but unsupported form, recognised by config.json alone."""
    named = _OF_SPECULATORS.get(str(config.get("speculators_model_type")))
    return named or next((form for key, form in _IN_CONFIG.items() if key in config), None)


def _refuse(unsupported: str | None, folder: Path) -> None:
    if unsupported is not None:
        raise UnsupportedModelError(
            f"{folder} is a {unsupported} drafter, which is not supported; "
            f"supported are {', '.join(_RECOGNISES)}"
        )
