"""Whether a folder can be a model: its configuration, weight files and tokenizer.

Nothing here needs MLX, so that commands that only look are quick. All functions raise
ModelNotFoundError where the folder holds no model, DamagedFileError naming a file that is truncated
or not what it should be, and UnsupportedModelError for a model that wants its own code run.
"""

from __future__ import annotations

from pathlib import Path

from redrafter_mlx.errors import (
    DamagedFileError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from redrafter_mlx.runtime.json_file import read_object
from redrafter_mlx.weights.gguf_header import read_header
from redrafter_mlx.weights.safetensors_header import SafetensorsHeader, read_safetensors_header

_INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "*.tiktoken", "merges.txt",
                    "spiece.model", "vocab.txt")  # fmt: skip


def check_model(path: Path) -> None:
    """Raise unless a GGUF file or a folder can be a model, as far as that shows without loading."""
    try:
        if path.is_file():
            read_header(path)
            return
        read_config(path)
        read_headers(path)
        check_tokenizer(path)
    except OSError as error:
        raise DamagedFileError(f"{path} cannot be read: {error.strerror or error}") from error


def read_config(folder: Path) -> dict[str, object]:
    """The configuration of mlx-lm's model."""
    path = folder / "config.json"
    if not path.exists():
        gguf = next(iter(sorted(folder.glob("*.gguf"))), None)
        hint = f"; give the file itself, {gguf}" if gguf else ""
        raise ModelNotFoundError(f"{folder} holds no config.json, so no model{hint}")
    config = read_object(path)
    if not isinstance(config.get("model_type"), str):
        raise DamagedFileError(f"{path}: it names no model_type")
    if "model_file" in config:  # mlx-lm before 0.32 runs it without being asked
        raise UnsupportedModelError(f"{folder} wants its own code to be run, which is refused")
    return config


def read_headers(folder: Path) -> dict[Path, SafetensorsHeader]:
    """The headers of every weight file, all of which the index names must be there."""
    files = sorted(folder.glob("model*.safetensors"))
    index = folder / _INDEX
    if index.exists():
        shards = read_object(index).get("weight_map")
        if not isinstance(shards, dict):
            raise DamagedFileError(f"{index}: it has no weight_map")
        for tensor, shard in shards.items():
            if not (folder / str(shard)).exists():
                raise DamagedFileError(f"{folder / str(shard)} is missing; it holds {tensor}")
    if not files:
        raise ModelNotFoundError(f"{folder} holds no model*.safetensors, so no model")
    return {file: read_safetensors_header(file) for file in files}


def check_tokenizer(folder: Path) -> None:
    """Raise DamagedFileError where there is no tokenizer in any form."""
    if not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        raise DamagedFileError(f"{folder} holds no tokenizer (tokenizer.json or tokenizer.model)")
