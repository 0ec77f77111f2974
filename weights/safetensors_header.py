"""The header of a safetensors file, read to refuse a damaged one before anything maps it."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from redrafter_mlx.errors import DamagedFileError


@dataclass(frozen=True)
class SafetensorsHeader:
    """A file's tensors: shape by name, and the header's bytes as they are."""

    shapes: dict[str, tuple[int, ...]]
    raw: bytes

    @property
    def metadata(self) -> dict[str, str]:
        """What the file says of itself; empty if it says nothing."""
        said = json.loads(self.raw).get("__metadata__", {})
        return said if isinstance(said, dict) else {}


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
        ends = {n: int(t["data_offsets"][1]) for n, t in tensors.items()}
        shapes = {n: tuple(int(s) for s in t["shape"]) for n, t in tensors.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFileError(f"{path}: its header is not that of a safetensors file") from error
    for name, end in sorted(ends.items(), key=lambda item: item[1]):
        if 8 + length + end > size:
            raise DamagedFileError(
                f"{path} is truncated: tensor {name} ends at byte {8 + length + end} "
                f"of a file of {size}"
            )
    return SafetensorsHeader(shapes, raw)
