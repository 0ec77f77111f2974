"""Names of drafters' tensors in the layouts and packagings that they are published in."""

from __future__ import annotations

import re
from collections.abc import Collection

Names = Collection[str]

IN_MEDUSA_MODEL = re.compile(r"^medusa_heads?\.")
"""Prefix of the heads' names in a Medusa-2 model, whose files hold the trunk's tensors too."""

SPECULATOR_PREFIX = "speculator."
"""Prefix of an MLP speculator's tensors in files for transformers."""

_MTP_PREFIX = r"(language_model\.)?(model\.)?mtp\."
_IN_MODEL = re.compile(
    rf"{_MTP_PREFIX}|(model\.)?mtp_layers\.\d+\.|model\.layers\.\d+\.(?=eh_proj\.)"
)
"""Prefix of an MTP head's tensors in the files of the model that it belongs to.

In DeepSeek-V3's layout it is a further layer of the model. Of several heads the first is meant."""

_QWENS = {
    "enorm.": "pre_fc_norm_embedding.",
    "hnorm.": "pre_fc_norm_hidden.",
    "eh_proj.": "fc.",
    "shared_head.norm.": "norm.",
    "shared_head_norm.": "norm.",
    "token_layernorm.": "pre_fc_norm_embedding.",
    "hidden_layernorm.": "pre_fc_norm_hidden.",
    "input_proj.": "fc.",
    "final_layernorm.": "norm.",
    "mtp_block.": "layers.0.",
    "": "layers.0.",
}
"""Names in the layouts of DeepSeek-V3, of mlx-vlm, of MiMo and speculators; and Qwen's."""

_OF_NEMOTRON = re.compile(r"layers\.\d+\.(enorm|hnorm|eh_proj|final_layernorm)\.")
_SCALE = re.compile(r"\.[kv]_scale$")
"""Names in the layout of Nemotron-H that are in none of its layers; and scales of its caches."""

_COPIES = ("embed_tokens.", "shared_head.head.", "lm_head.", "self_attn.rotary_emb.")


def own_name(name: str) -> str:
    """Return a tensor's name without the prefixes of any packaging."""
    bare = re.sub(rf"^{_MTP_PREFIX}", "", IN_MEDUSA_MODEL.sub("", name))
    return eagle_name(bare.removeprefix(SPECULATOR_PREFIX))


def eagle_name(name: str) -> str:
    """Return the network's own name for a tensor of an EAGLE or a block drafter's files."""
    name = name.removeprefix("model.")
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def of_mtp_head(names: Names) -> list[str]:
    """Return those names of a whole model's tensors that are its MTP head's."""
    prefix = _prefix_in_model(names)
    return [] if prefix is None else [name for name in names if name.startswith(prefix)]


def mtp_names(names: Names) -> dict[str, str]:
    """Return the names of an MTP head's tensors, each with its name in Qwen's own layout.

    Of other layouts, copies of the model's embedding and output layer are left out.
    """
    prefix = _prefix_in_model(names)
    if prefix is None:  # files of its own
        bare = {name: name.removeprefix("model.") for name in names}
    else:
        bare = {name: name[len(prefix) :] for name in names if name.startswith(prefix)}
    if "layers.0.eh_proj.weight" in bare.values():
        return {n: _OF_NEMOTRON.sub(_nemotrons, o) for n, o in bare.items() if not _SCALE.search(o)}
    if not any(own.startswith(("eh_proj.", "input_proj.")) for own in bare.values()):
        return bare
    return {name: _qwens(own) for name, own in bare.items() if not own.startswith(_COPIES)}


def _prefix_in_model(names: Names) -> str | None:
    found = next(filter(None, map(_IN_MODEL.match, sorted(names))), None)
    return None if found is None else found[0]


def _qwens(name: str) -> str:
    """Return Qwen's name for a tensor in another layout."""
    part = next(part for part in _QWENS if name.startswith(part))
    return _QWENS[part] + name[len(part) :]


def _nemotrons(found: re.Match[str]) -> str:
    return _QWENS[f"{found[1]}."]
