"""A training run's state on disk, from which it resumes as if it had not stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from redrafter_mlx.distill.corpus.shards import load_arrays
from redrafter_mlx.errors import BadInputError, DamagedFileError
from redrafter_mlx.runtime.atomic_write import atomic_write, remove_abandoned

CHECKPOINT = "checkpoint.safetensors"
FORMAT = "redrafter-mlx training 1"


@dataclass(frozen=True)
class Checkpoint:
    """A run's state.

    drafter, optimizer: parameters by dotted name
    made_by: what the run is, compared before it resumes
    step:    steps of the optimiser that were made
    epoch, batch: where in the order of batches it stands
    best:    the highest simulated tokens/step that was saved, 0 if none was
    """

    drafter: Mapping[str, mx.array]
    optimizer: Mapping[str, mx.array]
    made_by: Mapping[str, object]
    step: int
    epoch: int
    batch: int
    best: float


def save_checkpoint(state: Checkpoint, folder: Path) -> None:
    """Write one file, which appears whole or not at all, even if the machine stops."""
    arrays = {
        **{f"drafter.{name}": array for name, array in state.drafter.items()},
        **{f"optimizer.{name}": array for name, array in state.optimizer.items()},
    }
    position = {
        "made_by": state.made_by,
        "step": state.step,
        "epoch": state.epoch,
        "batch": state.batch,
        "best": state.best,
    }
    with atomic_write(folder / CHECKPOINT) as partial:
        mx.save_safetensors(str(partial), arrays, {"format": FORMAT, "state": json.dumps(position)})


def load_checkpoint(folder: Path) -> Checkpoint | None:
    """The run in a folder, None if there is none.

    Raises DamagedFileError, naming the file, for what is not a checkpoint.
    """
    path = folder / CHECKPOINT
    remove_abandoned(folder.glob(f".*.{CHECKPOINT}"))
    if not path.exists():
        return None
    try:
        arrays, metadata = load_arrays(path)
        if metadata.get("format") != FORMAT:
            raise ValueError(f"its format is {metadata.get('format')!r}, not {FORMAT!r}")
        mx.eval(arrays)
        position = json.loads(metadata["state"])
        parts: dict[str, dict[str, mx.array]] = {"drafter": {}, "optimizer": {}}
        for name, array in arrays.items():
            part, rest = name.split(".", 1)
            parts[part][rest] = array
        return Checkpoint(
            parts["drafter"],
            parts["optimizer"],
            position["made_by"],
            int(position["step"]),
            int(position["epoch"]),
            int(position["batch"]),
            float(position["best"]),
        )
    except (RuntimeError, ValueError, KeyError) as error:
        raise DamagedFileError(
            f"{path} cannot be used: {error}; delete it to train from the start"
        ) from None


def check_same_run(found: Checkpoint, made_by: Mapping[str, object], folder: Path) -> None:
    """Raise BadInputError, naming a key, unless the run in a folder is one of these options."""
    for key, wanted in made_by.items():
        if found.made_by.get(key) != wanted:
            raise BadInputError(
                f"{folder} holds a run with {key} {found.made_by.get(key)!r}, not {wanted!r}; "
                f"give another --output, or the same options to go on"
            )
