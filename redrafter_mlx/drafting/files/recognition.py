"""Which form of drafter a folder holds, by its config.json and the names of its tensors.

A `config.json` often names `LlamaForCausalLM` regardless of the contents, so the names decide. No
MLX is imported, so that listing drafters takes no time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from redrafter_mlx.drafting.files.tensor_names import IN_MEDUSA_MODEL, Names, of_mtp_head, own_name
from redrafter_mlx.errors import DamagedFileError, ModelNotFoundError, UnsupportedModelError
from redrafter_mlx.runtime.files.json_file import read_object
from redrafter_mlx.weights.files.names import MODEL_WEIGHTS
from redrafter_mlx.weights.files.tensors import open_tensors

CONFIG = "config.json"
RECURRENT, EAGLE3, EAGLE = "ReDrafter", "EAGLE-3", "EAGLE"
MEDUSA, MLP_SPECULATOR = "Medusa", "MLP speculator"
DFLASH, DFLASH2, DSPARK = "DFlash", "DFlash 2", "DSpark"
MTP, ASSISTANT = "MTP", "Gemma 4 assistant"

Config = Mapping[str, object]

OF_SPECULATORS = "speculators_model_type"
"""Key of config.json that names the form in files of vLLM's `speculators`."""

_QUANTISED = (".scales", ".weight_scale", ".weight_scale_inv", ".absmax")
"""Ends of the names of tensors that come with quantised weights, in MLX's and other formats."""


@dataclass(frozen=True)
class Signature:
    """What tells the files of one form from those of all others.

    Files fit that have one of the keys, or all tensors of `has` and none of `lacks`.

    has, lacks: patterns of whole names of tensors, as `own_name` returns them
    keys:       keys of config.json, or of `dflash_config` in it, that no other form has
    named:      the value of `OF_SPECULATORS`, which then decides
    supported:  whether it can be loaded
    quantised:  whether weights that are quantised already can be loaded
    """

    form: str
    has: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    named: str | None = None
    supported: bool = True
    quantised: bool = False

    def fits(self, config: Config, names: Iterable[str]) -> bool:
        """Whether files are of this form, by their config.json and all own names of tensors."""
        stated = config.get(OF_SPECULATORS)
        if stated is not None and self.named is not None:
            return stated == self.named
        nested = config.get("dflash_config")
        keys = {*config, *nested} if isinstance(nested, dict) else {*config}
        if not keys.isdisjoint(self.keys):
            return True

        def held(pattern: str) -> bool:
            return any(re.fullmatch(pattern, name) for name in names)

        return bool(self.has) and all(map(held, self.has)) and not any(map(held, self.lacks))


SIGNATURES = (
    Signature(RECURRENT, (r"rnn_u\.weight",), keys=("exit_dim",)),
    Signature(
        DFLASH2,
        (r"candidate_selector\..*",),
        keys=("selector_rank",),
        named="dflash2",
    ),
    Signature(DSPARK, (r"markov_head\..*",), keys=("markov_rank",), named="dspark"),
    Signature(
        DFLASH, (r"hidden_norm\.weight", r"fc\.weight"), keys=("dflash_config",), named="dflash"
    ),
    # Where a whole model's embedding is, the head is one part of it.
    Signature(
        MTP,
        (r"pre_fc_norm_hidden\.weight",),
        lacks=(r"(.*\.)?embed_tokens\.(weight|scales)",),
        named="mtp",
        quantised=True,
    ),
    # The layout of DeepSeek-V3, split off; in a whole model's files, the names have a prefix.
    Signature(MTP, (r"hnorm\.weight", r"eh_proj\.(weight|scales)"), quantised=True),
    Signature(
        MTP,
        (r"layers\.0\.eh_proj\.(weight|scales)", r"layers\.\d+\.final_layernorm\.weight"),
        lacks=(r"(.*\.)?(embed_tokens|embeddings)\.(weight|scales)",),
        quantised=True,
    ),
    Signature(ASSISTANT, (r"pre_projection\.weight", r"post_projection\.weight")),
    Signature("Hydra", (r"hydra.*",), keys=("hydra_num_heads",), supported=False),
    Signature("P-EAGLE", ("mask_hidden",), keys=("ptd_token_id",), named="peagle", supported=False),
    # Only a decoder layer and a norm, which continue from one of the target's first layers.
    Signature(
        "Kangaroo",
        (r"norm\.weight", r"layers\.0\.self_attn\.q_proj\.weight"),
        lacks=(r"fc\.weight", r"embed_tokens\.weight"),
        supported=False,
    ),
    Signature(EAGLE3, (r"layers\.0\.hidden_norm\.weight", r"fc\.weight"), named="eagle3"),
    # EAGLE-1 and EAGLE-2, whose networks are the same.
    Signature(
        EAGLE,
        (r"layers\.0\.self_attn\.q_proj\.weight", r"fc\.weight"),
        lacks=(r"norm\.weight", r"layers\.0\.(hidden_norm|input_layernorm)\.weight"),
    ),
    # A residual block's tensor in our names, the authors' and vLLM's.
    Signature(
        MEDUSA,
        (
            r"heads\.\d+\.blocks\.\d+\..*|\d+\.\d+\.linear\.(weight|bias)"
            r"|blocks\.\d+\.layers\.\d+\.(weight|bias)",
        ),
    ),
    Signature(MLP_SPECULATOR, (r"emb\.0\.weight", r"proj\.0\.weight", r"head\.0\.weight")),
)
"""In the order in which they are tried."""


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
    signature = _signature(config, names)
    _refuse(signature, folder)
    if signature is None:
        found = ", ".join(sorted(names)[:3])
        raise UnsupportedModelError(
            f"{folder} holds no drafter of a known form (its tensors: {found:.200}, ...); "
            f"supported are {_supported()}"
        )
    form = signature.form
    if form == MEDUSA:  # of a whole model, only the heads are looked at
        names = [name for name in names if IN_MEDUSA_MODEL.match(name)] or names
    quantised = next((name for name in names if name.endswith(_QUANTISED)), None)
    if quantised is not None and not signature.quantised:
        raise UnsupportedModelError(
            f"{folder}: its weights are quantised already (tensor {quantised:.80}); give the "
            f"drafter's 16-bit files; --drafter-bits quantises them at loading"
        )
    return form


def check_form(config: Config, folder: Path) -> None:
    """Raise UnsupportedModelError if a config.json is that of an unsupported form of drafter."""
    _refuse(_signature(config, ()), folder)


def is_drafter(config: Config, names: Names) -> bool:
    """Whether files are a drafter's of a known form, supported or not."""
    return _signature(config, names) is not None


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


def holds_mtp(folder: Path) -> bool:
    """Whether the files of a model bring an MTP head; False if they cannot be read."""
    try:
        return bool(of_mtp_head(open_tensors(folder, of_mtp_head).shapes))
    except DamagedFileError:
        return False


def _signature(config: Config, names: Names) -> Signature | None:
    own = [own_name(name) for name in names]
    return next((form for form in SIGNATURES if form.fits(config, own)), None)


def _supported() -> str:
    return ", ".join(dict.fromkeys(form.form for form in SIGNATURES if form.supported))


def _refuse(found: Signature | None, folder: Path) -> None:
    if found is not None and not found.supported:
        raise UnsupportedModelError(
            f"{folder} is a {found.form} drafter, which is not supported; "
            f"supported are {_supported()}"
        )
