"""Drafters on disk: `config.json` and `model.safetensors` in a folder, as in the paper's code."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.drafting import interface
from redrafter_mlx.drafting.recurrent import RecurrentNetwork
from redrafter_mlx.drafting.recurrent_config import DrafterConfig, check_target
from redrafter_mlx.errors import BadInputError, DamagedFileError, MismatchError, ModelNotFoundError
from redrafter_mlx.runtime.atomic_write import name_in_errors
from redrafter_mlx.runtime.json_file import read_object
from redrafter_mlx.target.model import Target

CONFIG = "config.json"
WEIGHTS = "model.safetensors"


def read_config(folder: str | Path) -> DrafterConfig:
    """The configuration of a drafter's folder; one readable error for anything wrong with it."""
    path = Path(folder) / CONFIG
    if not os.path.isdir(folder):
        raise ModelNotFoundError(f"no drafter at {folder}; give a folder that holds {CONFIG}")
    try:
        return DrafterConfig.from_dict(read_object(path))
    except FileNotFoundError:
        raise ModelNotFoundError(f"{path} is missing; a drafter's folder holds {CONFIG}") from None
    except BadInputError as error:
        raise DamagedFileError(f"{path}: {error}") from None


def holds_drafter(folder: Path) -> bool:
    """Whether a folder is that of a drafter rather than of a language model.

    A folder without a readable config counts as a drafter's, and `read_config` says what it lacks.
    """
    try:
        config = read_object(folder / CONFIG)
    except (FileNotFoundError, DamagedFileError):
        return True
    return "exit_dim" in config or "num_hidden_layers" not in config


@dataclass(frozen=True)
class DrafterFolder:
    """A drafter on disk, which is read when its target is known.

    target_name, target_fingerprint: of the target that it is to draft for, if they are known
    """

    path: Path
    target_name: str | None = None
    target_fingerprint: str | None = None

    def bind(self, target: Target, tokenizer: TokenizerWrapper) -> interface.Drafter:
        """The drafter; errors as in `load_drafter`."""
        return load_drafter(
            self.path,
            target,
            target_name=self.target_name,
            target_fingerprint=self.target_fingerprint,
        ).bind(target, tokenizer)


def load_drafter(
    folder: str | Path,
    target: Target,
    *,
    target_name: str | None = None,
    target_fingerprint: str | None = None,
) -> RecurrentNetwork:
    """A drafter for `target`, parameters evaluated, in the target's arithmetic.

    Raises:
      MismatchError: before any weight is read, naming both sides: hidden size, vocabulary, or
                     another target than `target_fingerprint`
      DamagedFileError: naming the file and the tensor: one is missing, misshapen, or not finite
                        in the target's arithmetic
    """
    config = read_config(folder)
    check_target(config, target.hidden_size, target.vocab_size)
    check_trained_for(config, folder, target_name, target_fingerprint)
    drafter = RecurrentNetwork.stored_as(config)
    _load_weights(drafter, Path(folder) / WEIGHTS)
    drafter.set_dtype(target.dtype)
    drafter.eval()
    _check_finite(drafter, Path(folder) / WEIGHTS)
    return drafter


def check_trained_for(
    config: DrafterConfig, folder: str | Path, name: str | None, fingerprint: str | None
) -> None:
    """Raises MismatchError, naming both, if the drafter was trained for another target.

    name, fingerprint: of the target that is present; without a fingerprint nothing is known
    """
    trained_for = config.target_fingerprint
    if trained_for is not None and fingerprint is not None and trained_for != fingerprint:
        raise MismatchError(
            f"{folder} was trained for {config.target or 'another target'} ({trained_for}), not "
            f"for {name or 'this target'} ({fingerprint})"
        )


def save_drafter(
    drafter: RecurrentNetwork, folder: str | Path, *, dtype: mx.Dtype | None = None
) -> None:
    """Write a drafter's folder; each file appears whole or not at all, the weights first.

    dtype: of what is stored in floating point; None stores it as it is

    Raises OSError naming the folder where it cannot be written.
    """
    folder = Path(folder)
    with name_in_errors(folder):
        _save(drafter, folder, dtype)


def _save(drafter: RecurrentNetwork, folder: Path, dtype: mx.Dtype | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(drafter.parameters()))
    if dtype is not None:
        weights = {
            name: array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array
            for name, array in weights.items()
        }
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as partial:
        part = Path(partial)
        mx.save_safetensors(str(part / WEIGHTS), weights, {"format": "mlx"})
        text = json.dumps(drafter.config.to_dict(), indent=2, sort_keys=True)
        (part / CONFIG).write_text(text + "\n", encoding="utf-8")
        for name in (WEIGHTS, CONFIG):
            os.replace(part / name, folder / name)


def _check_finite(drafter: RecurrentNetwork, path: Path) -> None:
    """Evaluate the parameters; raises DamagedFileError for values that are not finite."""
    parameters = dict(tree_flatten(drafter.parameters()))
    floating = {n: a for n, a in parameters.items() if mx.issubdtype(a.dtype, mx.floating)}
    finite = {name: mx.isfinite(array).all() for name, array in floating.items()}
    mx.eval(parameters, finite)
    for name, good in finite.items():
        if not good.item():
            dtype = str(floating[name].dtype).removeprefix("mlx.core.")
            raise DamagedFileError(
                f"{path}: tensor {name} holds values that are not finite in {dtype}"
            )


def _load_weights(drafter: RecurrentNetwork, path: Path) -> None:
    """Fill a drafter with the tensors of a file, all of them and no others."""
    if not path.is_file():
        raise DamagedFileError(f"{path} is missing; a drafter's folder holds {WEIGHTS}")
    try:
        stored = mx.load(str(path))
    except (RuntimeError, ValueError) as error:
        raise DamagedFileError(f"{path} cannot be read: {error}") from None
    assert isinstance(stored, dict)
    wanted = dict(tree_flatten(drafter.parameters()))
    for name, array in wanted.items():
        if name not in stored:
            raise DamagedFileError(f"{path} lacks tensor {name} of shape {list(array.shape)}")
        if stored[name].shape != array.shape:
            raise DamagedFileError(
                f"{path}: tensor {name} has shape {list(stored[name].shape)}, "
                f"config.json asks for {list(array.shape)}"
            )
    for name in stored:
        if name not in wanted:
            raise DamagedFileError(f"{path} holds tensor {name}, which config.json does not name")
    tokens = stored.get("draft_vocab")
    if tokens is not None:
        vocab_size, ids = drafter.config.vocab_size, np.array(tokens)
        if not np.issubdtype(ids.dtype, np.integer) or len(np.unique(ids)) < len(ids):
            raise DamagedFileError(f"{path}: tensor draft_vocab does not hold different token ids")
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise DamagedFileError(
                f"{path}: tensor draft_vocab holds ids outside 0 to {vocab_size - 1}"
            )
    drafter.load_weights(list(stored.items()))
