"""Files as PyTorch writes them, assembled byte by byte without PyTorch."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

ORDERED_DICT = b"ccollections\nOrderedDict\n"
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
START, STOP = b"\x80\x02", b"."

_KINDS = {
    mx.float16: "Half", mx.bfloat16: "BFloat16", mx.float32: "Float", mx.bool_: "Bool",
    mx.int64: "Long", mx.int32: "Int", mx.int16: "Short", mx.int8: "Char", mx.uint8: "Byte",
}  # fmt: skip


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def integer(value: int) -> bytes:
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def group(*parts: bytes) -> bytes:
    """Return the pickle of a tuple."""
    return b"(" + b"".join(parts) + b"t"


def counts(values: tuple[int, ...]) -> bytes:
    return group(*map(integer, values))


def storage(kind: str, key: str, size: int) -> bytes:
    name = b"ctorch\n" + f"{kind}Storage".encode() + b"\n"
    return group(text("storage"), name, text(key), text("cpu"), integer(size)) + b"Q"


def tensor(where: bytes, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    hooks = ORDERED_DICT + b")R"
    return (
        REBUILD
        + group(where, integer(offset), counts(shape), counts(strides), b"\x89", hooks)
        + b"R"
    )


def dictionary(items: Mapping[str, bytes]) -> bytes:
    pairs = b"".join(text(name) + value for name, value in items.items())
    return START + ORDERED_DICT + b")R(" + pairs + b"u" + STOP


def archive(
    path: Path, pickle: bytes, storages: Mapping[str, bytes], byteorder: bytes = b"little"
) -> Path:
    """Return a zip archive of PyTorch's form."""
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("archive/data.pkl", pickle)
        out.writestr("archive/byteorder", byteorder)
        for key, content in storages.items():
            out.writestr(f"archive/data/{key}", content)
        out.writestr("archive/version", b"3\n")
    return path


def write_torch_file(path: Path, arrays: Mapping[str, mx.array]) -> Path:
    """Write these arrays, each in a storage of its own."""
    items, storages = {}, {}
    for key, (name, array) in enumerate(arrays.items()):
        strides = tuple(int(np.prod(array.shape[i + 1 :])) for i in range(array.ndim))
        where = storage(_KINDS[array.dtype], str(key), array.size)
        items[name] = tensor(where, 0, array.shape, strides)
        storages[str(key)] = raw_bytes(array)
    return archive(path, dictionary(items), storages)


def raw_bytes(array: mx.array) -> bytes:
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    return np.array(array).tobytes()


@dataclass(frozen=True)
class Flat:
    """Float32 numbers 0, 1, 2, ... in storage 0, for hand-made tensors."""

    size: int = 12

    @property
    def where(self) -> bytes:
        return storage("Float", "0", self.size)

    @property
    def content(self) -> bytes:
        return np.arange(self.size, dtype=np.float32).tobytes()
