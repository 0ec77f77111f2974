"""A drafter's folder as it was published, and how a form of drafter reads it.

A form is recognised by the names of its tensors, since a `config.json` often names
`LlamaForCausalLM` regardless of the contents.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from redrafter_mlx.checks import shown
from redrafter_mlx.drafting.files.recognition import CONFIG, read_drafter_config
from redrafter_mlx.drafting.level_drafter import LevelDrafter
from redrafter_mlx.errors import BadInputError, DamagedFileError, MismatchError
from redrafter_mlx.runtime.device import dtype_name
from redrafter_mlx.runtime.files.atomic_write import flush_to_disk, name_in_errors
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.weights.files.names import WEIGHTS, Needed
from redrafter_mlx.weights.files.tensors import StoredTensors, open_tensors
from redrafter_mlx.weights.precision import no_layer_fits, quantize_layers

_SAVING = ".saving-"


@dataclass(frozen=True)
class DrafterFiles:
    """A drafter's folder with unread weights.

    config:  contents of config.json
    tensors: as described by the headers of the weight files
    bits:    4 or 8 quantises weights after reading; None leaves them as they are
    asked:   whether a caller named these bits, so that weights which do not allow it are refused
    """

    folder: Path
    config: Mapping[str, object]
    tensors: StoredTensors
    bits: int | None = None
    asked: bool = True

    def read(self, own_name: Callable[[str], str]) -> dict[str, mx.array]:
        """Read all tensors, under our names instead of the stored ones.

        Raises DamagedFileError also if two stored tensors would have the same name.
        """
        found: dict[str, mx.array] = {}
        for name, array in self.tensors.read().items():
            own = own_name(name)
            if own in found:
                raise DamagedFileError(
                    f"{self.tensors.path} holds {own} under several names, one of which is {name}"
                )
            found[own] = array
        return found

    def integer(
        self, key: str, default: int | None = None, minimum: int = 1, maximum: int = 2**31 - 1
    ) -> int:
        """Return the integer under a key; without a default the key must exist."""
        value = self.config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.bad_value(key, f"an integer from {minimum} to {maximum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return the positive number under a key; without a default the key must exist."""
        value = self.config.get(key, default)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e30:
            return float(value)
        raise self.bad_value(key, "a number above 0")

    def flag(self, key: str, default: bool) -> bool:
        """Whether a key is true; null is treated as missing."""
        value = self.config.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.bad_value(key, "true or false")
        return value

    def bad_value(self, key: str, wanted: str) -> DamagedFileError:
        """Return an error that names config.json, the key, its value and the expected value."""
        there = f"is {shown(self.config[key])}" if key in self.config else "is missing"
        return DamagedFileError(f"{self.folder / CONFIG}: {key} {there}; it must be {wanted}")


@dataclass(frozen=True)
class Form:
    """A published form of drafter, and how to load one from its files.

    name: as in `recognition.form_of`, such as "EAGLE-3"
    load: returns the drafter, bound to its target and evaluated. Raises MismatchError, naming both
          sides, before weights are read, and DamagedFileError
    """

    name: str
    load: Callable[[DrafterFiles, Target], LevelDrafter]


def open_files(
    folder: str | Path,
    bits: int | None = None,
    asked: bool = True,
    of: Needed | None = None,
) -> DrafterFiles:
    """Open a drafter's folder: its configuration and the headers of its weight files.

    of: only of the files with the tensors that it needs
    """
    config = read_drafter_config(folder)
    return DrafterFiles(Path(folder), config, open_tensors(Path(folder), of), bits, asked)


def check_trained_for(
    config: Mapping[str, object],
    folder: str | Path,
    name: str | None,
    fingerprint: str | None,
    earlier: str | None = None,
) -> None:
    """Raise MismatchError, naming both, if the drafter was trained for another target.

    config: of the drafter
    name, fingerprint, earlier: of the target at hand, see TargetSource; without a fingerprint
      nothing is checked
    """
    trained_for = config.get("target_fingerprint")
    known = fingerprint is None or trained_for in (fingerprint, earlier)
    if isinstance(trained_for, str) and not known:
        raise MismatchError(
            f"{folder} was trained for {config.get('target') or 'another target'} "
            f"({trained_for:.80}), not for {name or 'this target'} ({fingerprint})"
        )


def check_pair(mine: int, theirs: int, what: str) -> None:
    """Raise MismatchError, naming both, unless a size of the drafter is that of the target."""
    if mine != theirs:
        raise MismatchError(
            f"the drafter's {what} is {mine}, the target's is {theirs}; give a drafter that was "
            f"trained for this target"
        )


def check_tokens(tokens: mx.array, name: str, vocab_size: int, path: Path) -> None:
    """Raise DamagedFileError unless a tensor holds distinct token ids."""
    ids = np.array(tokens) if mx.issubdtype(tokens.dtype, mx.integer) else np.zeros(2, int)
    if len(np.unique(ids)) < ids.size:
        raise DamagedFileError(f"{path}: tensor {name} does not hold different token ids")
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise DamagedFileError(f"{path}: tensor {name} holds ids outside 0 to {vocab_size - 1}")


def write_drafter(
    folder: Path,
    tensors: Mapping[str, mx.array],
    config: Mapping[str, object],
    dtype: mx.Dtype | None = None,
    weights: str = WEIGHTS,
) -> None:
    """Write a drafter's folder; each file is written atomically, the weights first.

    dtype:   of floating-point tensors in the file; None stores them as they are
    weights: name of the weights' file

    Raises:
      OSError: naming the folder if it cannot be written
      DamagedFileError: naming a tensor that is not finite in `dtype`
    """
    stored = {
        name: array if dtype is None or not _is_floating(array) else array.astype(dtype)
        for name, array in tensors.items()
    }
    if dtype is not None:
        _check_finite(stored, folder)
    text = json.dumps(config, indent=2, sort_keys=True)
    with name_in_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for abandoned in folder.glob(f"{_SAVING}*"):  # by a process that was killed
            shutil.rmtree(abandoned, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=_SAVING) as partial:
            part = Path(partial)
            mx.save_safetensors(str(part / weights), stored, {"format": "mlx"})
            (part / CONFIG).write_text(text + "\n", encoding="utf-8")
            for name in (weights, CONFIG):
                flush_to_disk(part / name)
                os.replace(part / name, folder / name)


def fill(
    network: nn.Module, tensors: dict[str, mx.array], files: DrafterFiles, dtype: mx.Dtype
) -> None:
    """Load tensors into a network, all of them and no others, ready to draft.

    Floating-point tensors are cast to `dtype`; weights are quantised if `files.bits` is set.

    tensors: under the network's own names; emptied, so that each tensor is freed once it is cast

    Raises DamagedFileError naming the tensor that is missing, misshapen, unknown, of another kind
    of number, or not finite in `dtype`.
    """
    wanted = parameters_of(network)
    check_names_and_shapes(tensors, wanted, files.tensors.path)
    network.load_weights(list(tensors.items()))
    tensors.clear()
    network.set_dtype(dtype)
    network.eval()
    _check_finite(parameters_of(network), files.tensors.path)
    if files.bits is not None:
        if not quantize_layers(network, files.bits) and files.asked:
            raise BadInputError(no_layer_fits("drafter_bits", files.bits))
        mx.eval(network.parameters())


def check_names_and_shapes(
    tensors: Mapping[str, mx.array], wanted: Mapping[str, mx.array], path: Path
) -> None:
    for name, array in wanted.items():
        if name not in tensors:
            raise DamagedFileError(f"{path} lacks tensor {name} of shape {list(array.shape)}")
        if tensors[name].shape != array.shape:
            raise DamagedFileError(
                f"{path}: tensor {name} has shape {list(tensors[name].shape)}, "
                f"{CONFIG} asks for {list(array.shape)}"
            )
        if _is_floating(tensors[name]) != _is_floating(array):
            raise DamagedFileError(
                f"{path}: tensor {name} holds {dtype_name(tensors[name].dtype)}, "
                f"not {'numbers with a fraction' if _is_floating(array) else 'integers'}"
            )
    for name in tensors:
        if name not in wanted:
            raise DamagedFileError(f"{path} holds tensor {name}, which {CONFIG} does not name")


def _check_finite(tensors: Mapping[str, mx.array], path: Path) -> None:
    """Evaluate the tensors; raises DamagedFileError for values that are not finite.

    One at a time, so that the temporary memory of one is free for the next.
    """
    for name, array in tensors.items():
        mx.eval(array)
        if _is_floating(array) and not mx.isfinite(array).all().item():
            raise DamagedFileError(
                f"{path}: tensor {name} holds values that are not finite in "
                f"{dtype_name(array.dtype)}"
            )


def parameters_of(network: nn.Module) -> dict[str, mx.array]:
    """Return all arrays of a network by dotted name."""
    return dict(cast("list[tuple[str, mx.array]]", tree_flatten(network.parameters())))


def _is_floating(array: mx.array) -> bool:
    return mx.issubdtype(array.dtype, mx.floating)
