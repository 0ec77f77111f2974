"""Check a model's folder: configuration, safetensors headers, tokenizer.

Nothing here needs MLX, so commands that load no model are quick. All functions raise
ModelNotFoundError if the folder holds no model, DamagedFileError naming a file that is truncated
or not what it should be, and UnsupportedModelError for a model that requires its own code to run.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError, safe_open

from redrafter_mlx.checks import shown
from redrafter_mlx.errors import DamagedFileError, ModelNotFoundError, UnsupportedModelError
from redrafter_mlx.runtime.files.json_file import read_object
from redrafter_mlx.runtime.files.regular_file import check_regular
from redrafter_mlx.weights.files.names import MODEL_WEIGHTS, WEIGHTS, holds_tokenizer, shards
from redrafter_mlx.weights.gguf.header import read_header

_LAYER_COUNTS = (
    "num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_transformer_layers",
    "num_kv_reuse_layers", "num_nextn_predict_layers", "num_loops", "loop_num",
)  # fmt: skip
"""Keys of config.json that say how often a module is built or called; other sizes are those of
arrays, which take memory only when they are computed."""

MAX_LAYERS = 1000
"""Maximum number of layers while only a model's configuration is known; no model has as many."""

_SAMPLE = 64
"""Bytes that are read from the middle of each tensor to distinguish models of one architecture."""


@dataclass(frozen=True)
class SafetensorsHeader:
    """Header of a safetensors file: tensor shapes by name, and the file's metadata."""

    shapes: dict[str, tuple[int, ...]]
    metadata: dict[str, str]


def check_model(path: Path) -> None:
    """Raise unless a GGUF file or a folder can be a model, checked without loading it."""
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
    """Read the model's configuration for mlx-lm."""
    _check_regular_files(folder)
    path = folder / "config.json"
    if not path.exists():
        gguf = next(iter(sorted(folder.glob("*.gguf"))), None)
        hint = f"; give the file itself, {gguf}" if gguf else ""
        raise ModelNotFoundError(f"{folder} holds no config.json, so no model{hint}")
    config = read_object(path)
    if not isinstance(config.get("model_type"), str):
        raise DamagedFileError(f"{path}: it names no model_type")
    if "model_file" in config:  # mlx-lm before 0.32 runs it without asking
        raise UnsupportedModelError(f"{folder} wants its own code to be run, which is refused")
    return config


def check_layers(config: Mapping[str, object], max_layers: int, path: Path) -> None:
    """Raise DamagedFileError, naming the key in `path`, for more layers than there are tensors.

    Checked before it is built: millions of layers fill the memory before a tensor is missed.
    """
    text = config.get("text_config")
    for described in (config, text if isinstance(text, Mapping) else {}):
        for key in _LAYER_COUNTS:
            value = described.get(key)
            if isinstance(value, int) and value > max_layers:
                raise DamagedFileError(
                    f"{path}: {key} is {shown(value)}, and its weights hold at most {max_layers} "
                    f"layers"
                )


def _check_regular_files(folder: Path) -> None:
    """Raise DamagedFileError for anything but files and folders; libraries open many of them."""
    for path in folder.iterdir():
        try:
            check_regular(path)
        except FileNotFoundError:
            continue  # a link to nothing
        except OSError as error:
            raise DamagedFileError(f"{path} cannot be read: {error.strerror or error}") from None


def read_headers(folder: Path) -> dict[Path, SafetensorsHeader]:
    """Read the headers of all weight files; every file that the index names must exist."""
    files = sorted(folder.glob(MODEL_WEIGHTS))
    index = folder / f"{WEIGHTS}.index.json"
    if index.exists():
        shards(index)
    if not files:
        raise ModelNotFoundError(f"{folder} holds no {MODEL_WEIGHTS}, so no model")
    headers = {file: read_safetensors_header(file) for file in files}
    held: dict[str, Path] = {}
    for file, header in headers.items():
        for name in header.shapes:
            if name in held:
                raise DamagedFileError(
                    f"{file} holds tensor {name}, which {held[name].name} holds too; move the file "
                    f"away that is not of this model"
                )
            held[name] = file
    return headers


def folder_fingerprint(folder: Path, headers: Mapping[Path, SafetensorsHeader]) -> str:
    """Return the SHA-256 of config.json and the weight files' names, sizes and headers.

    Hashing 13 GB of weights at every load would take longer than loading them.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(headers):
        digest.update(f"\n{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            digest.update(_raw_header(file))
    return f"sha256:{digest.hexdigest()}"


def contents_of(path: Path, fingerprint: str) -> str:
    """Return the fingerprint of a model, with a hash of samples from its weights if it is a folder.

    Checkpoints of one training run differ only in their weights, so the fingerprint alone does not
    distinguish them. A GGUF file's fingerprint already covers all its weights.
    """
    if path.is_file():
        return fingerprint
    digest = hashlib.sha256()
    for weights in sorted(path.glob(MODEL_WEIGHTS)):
        with weights.open("rb") as file:
            tensors = json.loads(_raw_header(file))
            data = file.tell()
            tensors.pop("__metadata__", None)
            for begin, end in sorted(tensor["data_offsets"] for tensor in tensors.values()):
                file.seek(data + (begin + end) // 2)
                digest.update(file.read(min(_SAMPLE, end - (begin + end) // 2)))
    return f"{fingerprint} {digest.hexdigest()[:16]}"


def _raw_header(file: BinaryIO) -> bytes:
    """Read the header of a safetensors file from its start; the data follow."""
    (length,) = struct.unpack("<Q", file.read(8))
    return file.read(length)


def check_tokenizer(folder: Path) -> None:
    """Raise DamagedFileError if the folder holds no tokenizer file of any kind."""
    if not holds_tokenizer(path.name for path in folder.iterdir()):
        raise DamagedFileError(f"{folder} holds no tokenizer (tokenizer.json or tokenizer.model)")


def read_safetensors_header(path: Path) -> SafetensorsHeader:
    """Read a header and check that every tensor lies inside the file."""
    try:
        check_regular(path)
        path.open("rb").close()  # safe_open gives another reason for what cannot be read
        with safe_open(path, "numpy") as file:
            names = file.keys()
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
            return SafetensorsHeader(shapes, file.metadata() or {})
    except SafetensorError as error:
        raise DamagedFileError(f"{path} is truncated or no safetensors file: {error}") from None
    except OSError as error:
        raise DamagedFileError(f"{path} cannot be read: {error.strerror or error}") from None
