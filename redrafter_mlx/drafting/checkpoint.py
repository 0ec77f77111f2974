"""Recurrent drafters on disk: `config.json` and `model.safetensors`, as in the paper's code."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from redrafter_mlx.drafting import recognition
from redrafter_mlx.drafting.drafter_files import (
    DrafterFiles,
    Form,
    check_pair,
    check_tokens,
    fill,
    parameters_of,
    write_drafter,
)
from redrafter_mlx.drafting.recurrent import RecurrentNetwork
from redrafter_mlx.drafting.recurrent_config import config_of
from redrafter_mlx.target_model.model import Target

_OTHER_NAMES = (("input_projs.", "input_proj."), ("lm_heads.", "lm_head."), ("0.", "lm_head."))
"""Other prefixes of tensor names and the paper's, from TensorRT-LLM's
examples/redrafter/convert_checkpoint.py."""


def load_recurrent(files: DrafterFiles, target: Target) -> RecurrentNetwork:
    """Load a drafter's parameters, evaluated, in the target's arithmetic; errors as `Form.load`."""
    config = config_of(files.folder, files.config)
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
    recognition.RECURRENT,
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
