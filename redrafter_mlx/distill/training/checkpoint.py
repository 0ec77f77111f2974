"""A training run's state on disk, from which it resumes as if it had not stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx

from redrafter_mlx.distill.corpus.shards import load_arrays
from redrafter_mlx.errors import BadInputError, DamagedFileError
from redrafter_mlx.runtime.atomic_write import atomic_write, remove_abandoned

CHECKPOINT = "checkpoint.safetensors"
FORMAT = "redrafter-mlx training 1"


@dataclass
class Progress:
    """The progress of a training run.

    step:  step of the optimiser
    epoch, batch: position in the order of batches
    best:  highest simulated tokens/step of a saved drafter, 0 if none was saved
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    best: float = 0.0


@dataclass(frozen=True)
class Checkpoint:
    """A run's state.

    drafter, optimizer: parameters by dotted name
    made_by: what identifies the run, compared before it resumes
    """

    drafter: Mapping[str, mx.array]
    optimizer: Mapping[str, mx.array]
    made_by: Mapping[str, object]
    progress: Progress


def save_checkpoint(state: Checkpoint, folder: Path) -> None:
    """Write the checkpoint to one file, atomically, even if the machine stops."""
    arrays = {
        **{f"drafter.{name}": array for name, array in state.drafter.items()},
        **{f"optimizer.{name}": array for name, array in state.optimizer.items()},
    }
    record = json.dumps({"made_by": state.made_by, **asdict(state.progress)})
    with atomic_write(folder / CHECKPOINT) as partial:
        mx.save_safetensors(str(partial), arrays, {"format": FORMAT, "state": record})


def load_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the checkpoint of the run in a folder, None if there is none.

    Raises DamagedFileError, naming the file, if it is not a checkpoint.
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
        record = json.loads(metadata["state"])
        parts: dict[str, dict[str, mx.array]] = {"drafter": {}, "optimizer": {}}
        for name, array in arrays.items():
            part, rest = name.split(".", 1)
            parts[part][rest] = array
        made_by = record.pop("made_by")
        return Checkpoint(parts["drafter"], parts["optimizer"], made_by, Progress(**record))
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise DamagedFileError(
            f"{path} cannot be used: {error}; delete it to train from the start"
        ) from None


def check_same_run(found: Checkpoint, made_by: Mapping[str, object], folder: Path) -> None:
    """Raise BadInputError, naming a key, unless the run in a folder has the same options."""
    for key, wanted in made_by.items():
        if found.made_by.get(key) != wanted:
            raise BadInputError(
                f"{folder} holds a run with {key} {found.made_by.get(key)!r}, not {wanted!r}; "
                f"give another --output, or the same options to resume"
            )
