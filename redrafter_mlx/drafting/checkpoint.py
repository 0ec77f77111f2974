"""Recurrent drafters on disk: `config.json` and `model.safetensors`, as in the paper's code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx

from redrafter_mlx.drafting.drafter_files import (
    CONFIG,
    DrafterFiles,
    Form,
    check_pair,
    check_tokens,
    fill,
    parameters_of,
    read_drafter_config,
    write_drafter,
)
from redrafter_mlx.drafting.recurrent import RecurrentNetwork
from redrafter_mlx.drafting.recurrent_config import DrafterConfig
from redrafter_mlx.errors import BadInputError, DamagedFileError
from redrafter_mlx.target.model import Target

_OTHER_NAMES = (("input_projs.", "input_proj."), ("lm_heads.", "lm_head."), ("0.", "lm_head."))
"""Other prefixes of tensor names and the paper's, from TensorRT-LLM's
examples/redrafter/convert_checkpoint.py."""


def read_config(folder: str | Path) -> DrafterConfig:
    """Read the configuration in a drafter's folder; one readable error for anything wrong."""
    return _config(Path(folder), read_drafter_config(folder))


def load_recurrent(files: DrafterFiles, target: Target) -> RecurrentNetwork:
    """Load a drafter's parameters, evaluated, in the target's arithmetic; errors as `Form.load`."""
    config = _config(files.folder, files.config)
    check_pair(config.hidden_size, target.hidden_size, "hidden size")
    check_pair(config.vocab_size, target.vocab_size, "vocabulary")
    drafter = RecurrentNetwork(config)
    tensors = files.read(own_name)
    if "draft_vocab" in tensors:
        check_tokens(tensors["draft_vocab"], "draft_vocab", config.vocab_size, files.tensors.path)
        tensors["draft_vocab"] = tensors["draft_vocab"].astype(mx.int32)
    fill(drafter, tensors, files, target.dtype)
    return drafter


def own_name(name: str) -> str:
    """Return the paper's name of a tensor, given any name that TensorRT-LLM's converter reads."""
    for other, own in _OTHER_NAMES:
        if name.startswith(other):
            return own + name.removeprefix(other)
    return name


RECURRENT = Form(
    "ReDrafter",
    recognises=lambda files: "exit_dim" in files.config or "rnn_u.weight" in files.tensors.shapes,
    load=lambda files, target: load_recurrent(files, target).bind(target),
)
"""The paper's own files, with or without our extensions, and those that TensorRT-LLM reads."""


def save_drafter(
    drafter: RecurrentNetwork, folder: str | Path, *, dtype: mx.Dtype | None = None
) -> None:
    """Write a drafter's folder; each file is written atomically, the weights first.

    dtype: of floating-point tensors in the file; None stores them as they are

    Raises OSError naming the folder if it cannot be written.
    """
    write_drafter(Path(folder), parameters_of(drafter), drafter.config.to_dict(), dtype)


def _config(folder: Path, content: Mapping[str, object]) -> DrafterConfig:
    try:
        return DrafterConfig.from_dict(content)
    except BadInputError as error:
        raise DamagedFileError(f"{folder / CONFIG}: {error}") from None
