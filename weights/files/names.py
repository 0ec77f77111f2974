"""Select the files of a folder or a repository that hold its weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from fnmatch import fnmatch
from pathlib import Path

from redrafter_mlx.errors import DamagedFileError
from redrafter_mlx.runtime.files.json_file import read_object

Needed = Callable[[Collection[str]], Collection[str]]
"""Returns those names of a model's tensors that are needed."""

WEIGHTS = "model.safetensors"

MODEL_WEIGHTS = "model*.safetensors"
"""Pattern of the weight files that mlx-lm loads a language model from."""

_PATTERNS = (
    (WEIGHTS, MODEL_WEIGHTS), ("", "*.safetensors"),
    ("pytorch_model.bin", "pytorch_model*.bin"), ("", "*.bin"), ("", "*.pt"),
)  # fmt: skip
"""Name of a single file with all weights, and pattern of shards or other names; best first."""

_TRAINER_FILES = (
    "optimizer.bin", "optimizer.pt", "random_states.pt", "rng_state.pt", "scheduler.bin",
    "scheduler.pt", "training_args.bin", "training_state.pt",
)  # fmt: skip
"""Other files that trainers write next to weights."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "*.tiktoken", "merges.txt",
                    "spiece.model", "vocab.txt")  # fmt: skip


def holds_tokenizer(names: Iterable[str]) -> bool:
    """Whether any of a folder's file names is that of a tokenizer's file."""
    return any(fnmatch(name, pattern) for name in names for pattern in _TOKENIZER_FILES)


def weight_names(names: Collection[str]) -> list[str]:
    """Return those of a folder's file names that hold its weights, an index of shards first.

    Safetensors are preferred to PyTorch files.
    """
    for whole, pattern in _PATTERNS:
        if whole in names:
            return [whole]
        found = sorted(n for n in names if fnmatch(n, pattern) and n not in _TRAINER_FILES)
        index = f"{whole}.index.json"
        if found:
            return [index, *found] if index in names else found
    return []


def weight_files(folder: Path, of: Needed | None = None) -> list[Path]:
    """Return the files that hold a folder's weights, all of which exist.

    of: only those that hold tensors which it needs, as far as an index tells

    Raises DamagedFileError if there is none, or one that an index names is missing.
    """
    found = weight_names([path.name for path in folder.iterdir() if path.is_file()])
    if not found:
        raise DamagedFileError(f"{folder / WEIGHTS} is missing; a drafter's folder holds {WEIGHTS}")
    if found[0].endswith(".json"):
        return shards(folder / found[0], of)
    return [folder / name for name in found]


def shards(index: Path, of: Needed | None = None) -> list[Path]:
    """Return the files that an index names; raises DamagedFileError if any is missing."""
    files = [index.parent / name for name in shard_names(index, of)]
    for file in files:
        if not file.is_file():
            raise DamagedFileError(f"{file} is missing; {index.name} names it")
    return files


def shard_names(index: Path, of: Needed | None = None) -> list[str]:
    """Return the names of an index's files; `of` as in `weight_files`."""
    names = read_object(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise DamagedFileError(f"{index}: it has no weight_map")
    needed = names if of is None else of(names)
    return sorted({Path(str(names[name])).name for name in needed})
