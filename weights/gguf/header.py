"""Header of a GGUF file: its metadata, and the offset of each tensor.

It is parsed here and not by MLX, so that a damaged file is refused, naming the damage, before MLX
maps it into memory. Format: ggml's docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from redrafter_mlx.errors import DamagedFileError
from redrafter_mlx.runtime.files.regular_file import check_regular

BITS = {
    "Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8, "Q4_K": 4, "Q5_K": 5, "MXFP4": 4,
}  # fmt: skip
"""Bits per weight, in the types that stay quantised."""

READABLE = ("F32", "F16", "BF16", *BITS, "Q6_K")
"""The types that can be loaded."""

_FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K",
    11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S",
    17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS",
    23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M",
    30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0",
}  # fmt: skip
"""Names of mixtures of types, by `general.file_type`: llama.cpp's `llama_ftype`."""

T = TypeVar("T")

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
            12: "d"}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_PART = re.compile(r"(.*-)(\d{5})(-of-)(\d{5})(\.gguf)", re.DOTALL)
"""Name of a part of a split file, as llama.cpp writes and expects it."""

# Number: (name, elements in a block, bytes in a block).
_TENSOR_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: shape, rows first as in MLX, type, and its file, with offset and size in it."""

    path: Path
    shape: tuple[int, ...]
    type: str
    start: int
    nbytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """Everything before the weights; metadata values are int, float, bool, str or lists.

    path:  the file, for errors; of a split file the part that was named
    files: all its parts
    """

    path: Path
    metadata: dict[str, object]
    tensors: dict[str, TensorInfo]
    files: tuple[Path, ...]

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Return a value of the metadata; raises DamagedFileError if it is not of this type."""
        value = self.metadata.get(key, default)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:  # isinstance would take a bool for an int
            raise self._wrong(key, kind.__name__)
        return value

    def items(self, key: str, kind: type[T]) -> list[T]:
        """Return a list of the metadata; raises DamagedFileError if it is not of this type."""
        value = self.metadata.get(key)
        if not isinstance(value, list) or not all(isinstance(v, kind) for v in value):
            raise self._wrong(key, f"list of {kind.__name__}")
        return value

    def _wrong(self, key: str, wanted: str) -> DamagedFileError:
        what = "lacks" if key not in self.metadata else f"has no {wanted} for"
        return DamagedFileError(f"{self.path}: its metadata {what} {key}")


def read_header(path: Path) -> GGUFHeader:
    """Read the header, of a split file those of all parts, and check that every tensor is there.

    Raises DamagedFileError naming the file and what is cut off or wrong in it, and OSError.
    """
    named = _read_file(path)
    count = named.get("split.count", int, 0)
    if count <= 1:
        return named
    parts = parts_of(path)
    if len(parts) != count:
        raise DamagedFileError(
            f"{path} is one of {count} parts, and its name does not tell the others'; "
            f"it must end with -00001-of-{count:05}.gguf, or the number of the part"
        )
    metadata: dict[str, object] = {}
    tensors: dict[str, TensorInfo] = {}
    for number, part in enumerate(parts):
        if not part.exists():
            raise DamagedFileError(f"{path} is one of {count} parts, and {part} is not here")
        header = named if part == path else _read_file(part)
        if header.get("split.no", int) != number or header.get("split.count", int) != count:
            raise DamagedFileError(f"{part} is not part {number + 1} of {count}, as its name says")
        if twice := tensors.keys() & header.tensors.keys():
            raise DamagedFileError(f"{part}: another part holds tensor {min(twice)}, too")
        metadata = header.metadata if number == 0 else metadata
        tensors |= header.tensors
    return GGUFHeader(path, metadata, tensors, parts)


def parts_of(path: Path) -> tuple[Path, ...]:
    """Return the parts of a split file, by the name of any one; of another file, itself."""
    found = _PART.fullmatch(path.name)
    if found is None:
        return (path,)
    before, _, of, count, after = found.groups()
    names = [f"{before}{i + 1:05}{of}{count}{after}" for i in range(int(count))]
    return tuple(path.with_name(name) for name in names) if path.name in names else (path,)


def _read_file(path: Path) -> GGUFHeader:
    check_regular(path)
    with path.open("rb") as file:
        if path.stat().st_size < 24 or file.read(4) != _MAGIC:
            raise DamagedFileError(f"{path} is not a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = _Reader(path, data)
            version = reader.scalar("I")
            if version not in (2, 3):
                raise DamagedFileError(f"{path}: GGUF version {version}; 2 and 3 are read")
            n_tensors, n_entries = reader.count("tensors"), reader.count("metadata entries")
            metadata = dict(reader.entry() for _ in range(n_entries))
            infos = [reader.tensor() for _ in range(n_tensors)]
            alignment = metadata.get("general.alignment", 32)
            if not isinstance(alignment, int) or alignment <= 0:
                raise DamagedFileError(f"{path}: general.alignment is {alignment!r}")
            base = -(-reader.at // alignment) * alignment
            tensors = _place(path, infos, base, len(data))
            return GGUFHeader(path, metadata, tensors, (path,))


def _place(
    path: Path, infos: list[tuple[str, tuple[int, ...], int, int]], base: int, size: int
) -> dict[str, TensorInfo]:
    """Return the tensors with absolute offsets, each checked against the end of the file."""
    tensors = {}
    for name, shape, kind, offset in infos:
        if kind not in _TENSOR_TYPES:
            raise DamagedFileError(f"{path}: tensor {name} is of unknown type {kind}")
        type_name, block, block_bytes = _TENSOR_TYPES[kind]
        if name in tensors or not shape or shape[-1] % block:
            raise DamagedFileError(f"{path}: tensor {name} has shape {shape} or is there twice")
        nbytes = math.prod(shape) // block * block_bytes
        if base + offset + nbytes > size:
            raise DamagedFileError(
                f"{path} is truncated: tensor {name} ends at byte {base + offset + nbytes} "
                f"of a file of {size}"
            )
        tensors[name] = TensorInfo(path, shape, type_name, base + offset, nbytes)
    return tensors


class _Reader:
    """A cursor over the header that refuses to run past the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self.at = len(_MAGIC)

    def scalar(self, code: str) -> int:
        return self._values(code, 1)[0]

    def count(self, what: str) -> int:
        """Read a 64-bit count; refuse one that exceeds the number of bytes left in the file."""
        n = self.scalar("Q")
        if n > len(self._data) - self.at:
            raise DamagedFileError(f"{self._path} is damaged: {n} {what} at byte {self.at}")
        return n

    def string(self) -> str:
        n = self.count("characters")
        raw = self._data[self.at : self.at + n]
        self.at += n
        return raw.decode("utf-8", "replace")

    def entry(self) -> tuple[str, object]:
        return self.string(), self._value(self.scalar("I"))

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, n = self.string(), self.scalar("I")
        if n > _MAX_DIMENSIONS:
            raise DamagedFileError(f"{self._path}: tensor {name!r} has {n} dimensions")
        columns_first = self._values("Q", n)
        return name, tuple(reversed(columns_first)), self.scalar("I"), self.scalar("Q")

    def _value(self, kind: int) -> object:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            kind, n = self.scalar("I"), self.count("values")
            if kind in _SCALARS:
                return list(self._values(_SCALARS[kind], n))
            if kind == _STRING:
                return self._strings(n)
        # An array of arrays is refused too: no model has one, and many would exhaust the stack.
        raise DamagedFileError(f"{self._path}: unknown metadata type {kind} at {self.at}")

    def _strings(self, n: int) -> list[str]:
        """Read `n` consecutive strings in one fast loop: a vocabulary has one for each token."""
        length_at = struct.Struct("<Q").unpack_from
        data, at, end, found = self._data, self.at, len(self._data), []
        for _ in range(n):
            text = at + 8
            after = text + length_at(data, at)[0] if text <= end else end + 1
            if after > end:
                raise DamagedFileError(f"{self._path} is truncated in its header, at byte {at}")
            found.append(data[text:after].decode("utf-8", "replace"))
            at = after
        self.at = at
        return found

    def _values(self, code: str, n: int) -> tuple[int, ...]:
        layout = struct.Struct(f"<{n}{code}")
        if self.at + layout.size > len(self._data):
            raise DamagedFileError(f"{self._path} is truncated in its header")
        values = layout.unpack_from(self._data, self.at)
        self.at += layout.size
        return values


def weight_types(header: GGUFHeader) -> str | None:
    """Describe the types of a file's matrices: `Q4_K_M (Q4_K 82%, Q6_K 18%)`; None without any."""
    sizes: Counter[str] = Counter()
    for tensor in header.tensors.values():
        if len(tensor.shape) >= 2:
            sizes[tensor.type] += math.prod(tensor.shape)
    if not sizes:
        return None
    kind = header.metadata.get("general.file_type")
    named = _FILE_TYPES.get(kind) if isinstance(kind, int) else None
    if named is None or [*sizes] == [named]:
        return next(iter(sizes)) if len(sizes) == 1 else _shares(sizes)
    return f"{named} ({_shares(sizes)})"


def _shares(sizes: Counter[str]) -> str:
    return ", ".join(f"{kind} {n / sizes.total():.0%}" for kind, n in sizes.most_common())
