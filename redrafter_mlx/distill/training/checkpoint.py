"""A training run's state on disk, from which it resumes as if it had not stopped."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from redrafter_mlx.distill.checked_arrays import load_arrays, save_arrays
from redrafter_mlx.distill.corpus.shards import naming_damage
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.files.atomic_write import remove_abandoned

CHECKPOINT = "checkpoint.safetensors"
FORMAT = "redrafter-mlx training 3"


@dataclass
class Progress:
    """The progress of a training run.

    Raises ValueError for numbers that no run has.
    """

    step: int = 0  # step of the optimiser
    epoch: int = 0  # position in the order of batches
    batch: int = 0
    best: float = 0.0  # highest simulated tokens/step of a saved drafter, 0 if none was saved
    saved: str = ""  # SHA-256 of that drafter's weights

    def __post_init__(self) -> None:
        whole = all(type(n) is int and n >= 0 for n in (self.step, self.epoch, self.batch))
        if not whole or type(self.best) not in (int, float) or not 0 <= self.best < math.inf:
            raise ValueError(f"it has {self}")


@dataclass(frozen=True)
class Checkpoint:
    """A run's state."""

    drafter: Mapping[str, object]  # tree of parameters
    optimizer: Mapping[str, object]
    made_by: Mapping[str, object]  # what identifies the run, compared before it resumes
    progress: Progress

    @property
    def max_bytes(self) -> int | None:
        """Maximum size of the run's corpus on disk; None if its record has none."""
        held = self.made_by.get("cache_bytes")
        return held if isinstance(held, int) and held > 0 else None


def save_checkpoint(state: Checkpoint, folder: Path) -> None:
    """Write the checkpoint to one file, atomically, even if the machine stops."""
    arrays: dict[str, mx.array] = dict(
        tree_flatten({"drafter": state.drafter, "optimizer": state.optimizer})
    )
    record = json.dumps({"made_by": state.made_by, **asdict(state.progress)})
    save_arrays(folder / CHECKPOINT, arrays, {"format": FORMAT, "state": record})


def check_same_run(folder: Path, found: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    """Raise BadInputError, naming a key, if the run in a folder was made by another value of it."""
    for key, value in wanted.items():
        if found.get(key) != value:
            raise BadInputError(
                f"{folder} holds a run with {key} {found.get(key)!r}, not {value!r}; "
                f"give another --output, or the same options to resume"
            )


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the checkpoint of the run in a folder, None if there is none; DamagedFileError."""
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    with naming_damage(path, "delete it to train from the start"):
        arrays, metadata = load_arrays(path, FORMAT)
        record = json.loads(metadata["state"])
        trees, found = dict(tree_unflatten(arrays)), dict(record.pop("made_by"))
        progress = Progress(**record)
    return Checkpoint(trees.get("drafter", {}), trees.get("optimizer", {}), found, progress)


def load_checkpoint(
    folder: Path, made_by: Mapping[str, object], drafter: Mapping[str, object]
) -> Checkpoint | None:
    """Return the checkpoint as `read_checkpoint`; remove what a killed run wrote of the next one.

    Raises BadInputError, naming a key, if it was made by another value of it, and DamagedFileError
    if it does not hold the parameters of `drafter`, a tree of arrays.
    """
    remove_abandoned(folder.glob(f".*.{CHECKPOINT}"))
    found = read_checkpoint(folder)
    if found is None:
        return None
    check_same_run(folder, found.made_by, made_by)
    with naming_damage(folder / CHECKPOINT, "delete it to train from the start"):
        here = _shapes(found.drafter)
        lacking = {name for name, shape in _shapes(drafter).items() if here.get(name) != shape}
        if lacking:
            raise ValueError(f"it lacks {min(lacking)} in this drafter's shape")
    return found


def _shapes(tree: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    leaves = cast("list[tuple[str, mx.array]]", tree_flatten(tree))
    return {name: array.shape for name, array in leaves}
