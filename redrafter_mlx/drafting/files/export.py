"""Export drafters to folders that other servers read, without our extensions.

The formats follow the readers' code: TensorRT-LLM's `examples/redrafter/convert_checkpoint.py`, the
Medusa authors' `medusa/model/medusa_model.py`, speculators' `Eagle3SpeculatorConfig`, and vLLM's
`mlp_speculator` models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import mlx.core as mx

from redrafter_mlx.drafting.files.drafter_files import (
    DrafterFiles,
    Form,
    check_names_and_shapes,
    open_files,
    parameters_of,
    write_drafter,
)
from redrafter_mlx.drafting.files.forms import find_form
from redrafter_mlx.drafting.published.heads.eagle import EAGLE3
from redrafter_mlx.drafting.published.heads.medusa import MEDUSA, TOKEN_MAP, authors_name, own_names
from redrafter_mlx.drafting.published.heads.mlp_speculator import MLP_SPECULATOR
from redrafter_mlx.drafting.recurrent import RECURRENT, RecurrentNetwork, own_name
from redrafter_mlx.drafting.recurrent_config import DrafterConfig, read_config
from redrafter_mlx.errors import BadInputError, MismatchError
from redrafter_mlx.runtime.files.paths import visible_files

ExportFormat = Literal["speculators", "trtllm", "medusa"]

_FORMS: Mapping[ExportFormat, tuple[Form, ...]] = {
    "speculators": (EAGLE3, MLP_SPECULATOR),
    "trtllm": (RECURRENT,),
    "medusa": (MEDUSA,),
}

_PAPER_KEYS = (
    "hidden_size",
    "vocab_size",
    "exit_dim",
    "num_draft_layers",
    "num_lookback_tokens",
    "rnn",
)
"""Keys of a recurrent drafter that are not our extensions."""

_RECORD_KEYS = ("target", "target_fingerprint", "draft_length")
"""Our keys that record how a drafter was made; the drafter works without them."""


_OF_A_HEAD = re.compile(r"heads\.\d+\.")


def export_drafter(folder: Path, output: Path, form: ExportFormat) -> None:
    """Write the drafter in `folder` into `output`, in float16.

    Raises MismatchError, naming it, for a form of drafter that the format does not hold or for an
    extension that its readers do not support, BadInputError if the output exists, and
    DamagedFileError for tensors that are not finite in float16 or, for trtllm, are not those of the
    configuration.
    """
    files = open_files(folder)
    found = find_form(files)
    if found not in _FORMS[form]:
        held = " and ".join(each.name for each in _FORMS[form])
        raise MismatchError(
            f"{folder} is a drafter of the form {found.name}; {form} holds {held} drafters"
        )
    if output.exists() and (visible_files(output) if output.is_dir() else [output]):
        raise BadInputError(f"{output} is there already; give another --output")
    tensors, config, weights = _converted(files, form)
    write_drafter(output, tensors, config, mx.float16, weights)


def _converted(
    files: DrafterFiles, form: ExportFormat
) -> tuple[Mapping[str, mx.array], Mapping[str, object], str]:
    """Return tensors, configuration and the name of the weights' file."""
    if form == "trtllm":
        return *_for_trtllm(files), "model.safetensors"
    if form == "medusa":
        return *_for_medusa(files), "medusa_lm_head.safetensors"
    if find_form(files) == EAGLE3 and files.config.get("speculators_model_type") != "eagle3":
        raise MismatchError(
            f"{files.folder} is laid out as EAGLE's authors do it, which vLLM reads as it is; "
            f"--format speculators is for drafters that were trained here"
        )
    config = {key: value for key, value in files.config.items() if key not in _RECORD_KEYS}
    return files.tensors.read(), config, "model.safetensors"


def _for_medusa(files: DrafterFiles) -> tuple[Mapping[str, mx.array], Mapping[str, object]]:
    """Return Medusa heads of any layout under the authors' names.

    The authors' code, too, uses the target's output matrix for heads that store none.
    """
    names = own_names(files)
    if TOKEN_MAP in files.tensors.shapes:
        raise MismatchError(
            f"{files.folder} drafts some tokens only (draft_vocab), which Medusa's authors do not "
            f"know; train one with --draft-vocab all"
        )
    if "output.weight" in names.values():
        raise MismatchError(
            f"the heads in {files.folder} share an output matrix, those of Medusa's authors do not"
        )
    if any(".blocks.1." in own for own in names.values()):
        raise MismatchError(
            f"the heads in {files.folder} have several layers, those of its authors have one"
        )
    if unknown := [name for name, own in names.items() if not _OF_A_HEAD.match(own)]:
        raise MismatchError(f"{files.folder} holds {unknown[0]}, which is of none of its heads")
    stored = files.tensors.read()
    tensors = {authors_name(own): stored[name] for name, own in names.items()}
    base = files.config.get("base_model_name_or_path") or files.config.get("target")
    return tensors, {
        "medusa_num_heads": len({own.split(".")[1] for own in names.values()}),
        "medusa_num_layers": 1,
        "base_model_name_or_path": base,
    }


def _for_trtllm(files: DrafterFiles) -> tuple[Mapping[str, mx.array], Mapping[str, object]]:
    """Return a recurrent drafter under the paper's names, which TensorRT-LLM's converter reads."""
    config = read_config(files.folder)
    plain = DrafterConfig(**{name: getattr(config, name) for name in _PAPER_KEYS})
    mine, theirs = config.to_dict(), plain.to_dict()
    for key in sorted(mine.keys() - _RECORD_KEYS):
        if mine[key] != theirs.get(key):
            raise MismatchError(
                f"{files.folder} has {key} = {mine[key]}, an extension that TensorRT-LLM does not "
                f"know; `redrafter-mlx train --recipe paper` makes one without"
            )
    tensors = files.read(own_name)
    check_names_and_shapes(tensors, parameters_of(RecurrentNetwork(config)), files.tensors.path)
    return tensors, {
        key: value for key, value in theirs.items() if key in (*_PAPER_KEYS, "model_type")
    }
