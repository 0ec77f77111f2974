"""Checks of a model's folder: configuration, safetensors headers, tokenizer.

Nothing here needs MLX, so commands that load no model are quick. All functions raise
ModelNotFoundError where the folder holds no model, DamagedFileError naming a file that is truncated
or not what it should be, and UnsupportedModelError for a model that wants its own code run.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from redrafter_mlx.errors import (
    DamagedFileError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from redrafter_mlx.runtime.json_file import read_object
from redrafter_mlx.weights.gguf.header import read_header

_INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "*.tiktoken", "merges.txt",
                    "spiece.model", "vocab.txt")  # fmt: skip

_WIDTHS = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of an element of each type that MLX reads from safetensors."""

_MAX_DIMENSIONS = 32


@dataclass(frozen=True)
class SafetensorsHeader:
    """A file's tensors: shape by name, and the header's bytes as they are."""

    shapes: dict[str, tuple[int, ...]]
    raw: bytes

    @property
    def metadata(self) -> dict[str, str]:
        """What the file says of itself; empty if it says nothing."""
        content = json.loads(self.raw).get("__metadata__", {})
        return content if isinstance(content, dict) else {}


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


def folder_fingerprint(folder: Path, headers: Mapping[Path, SafetensorsHeader]) -> str:
    """SHA-256 over config.json and the weight files' names, sizes and headers.

    Hashing 13 GB at every load would cost more than loading them.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file, header in sorted(headers.items()):
        digest.update(f"\n{file.name} {file.stat().st_size}\n".encode())
        digest.update(header.raw)
    return f"sha256:{digest.hexdigest()}"


def check_tokenizer(folder: Path) -> None:
    """Raise DamagedFileError where there is no tokenizer in any form."""
    if not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        raise DamagedFileError(f"{folder} holds no tokenizer (tokenizer.json or tokenizer.model)")


def read_safetensors_header(path: Path) -> SafetensorsHeader:
    """Read a header and make sure that every tensor lies inside the file.

    Raises DamagedFileError naming the file and the tensor.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if 8 + length > size:
            raise DamagedFileError(f"{path} is truncated in its header ({size} bytes)")
        raw = file.read(length)
    try:
        content = json.loads(raw)
        tensors = {n: t for n, t in content.items() if n != "__metadata__"}
        places = {n: t["data_offsets"] for n, t in tensors.items()}
        spans = {n: (int(place[0]), int(place[1])) for n, place in places.items()}
        shapes = {n: tuple(int(s) for s in t["shape"]) for n, t in tensors.items()}
        widths = {n: _WIDTHS.get(t["dtype"]) for n, t in tensors.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
        raise DamagedFileError(f"{path}: its header is not that of a safetensors file") from None
    at = 0
    for name, (start, end) in sorted(spans.items(), key=lambda item: item[1]):
        if 8 + length + end > size:
            raise DamagedFileError(
                f"{path} is truncated: tensor {name} ends at byte {8 + length + end} "
                f"of a file of {size}"
            )
        width, shape = widths[name], shapes[name]
        wrong = len(shape) > _MAX_DIMENSIONS or min(shape, default=0) < 0 or start < at
        if wrong or (width is not None and prod(shape) * width != end - start):
            raise DamagedFileError(
                f"{path}: tensor {name:.80} of shape {list(shape)!s:.80} cannot be at bytes "
                f"{start} to {end}"
            )
        at = end
    return SafetensorsHeader(shapes, raw)
