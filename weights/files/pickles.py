"""The tensors of a `.bin` or `.pt` file that PyTorch has written, without PyTorch.

Such a file is a zip archive that compresses nothing: `NAME/data.pkl` says what the tensors are (see
tensor_pickle.py, which reads it without unpickling it) and `NAME/data/KEY` holds the numbers of one
storage. PyTorch before 1.6 wrote another format, which is refused.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import mlx.core as mx
import numpy as np

from redrafter_mlx.errors import DamagedFileError
from redrafter_mlx.weights.files.tensor_pickle import (
    MAX_BYTES,
    STORAGES,
    RefusedError,
    Storage,
    TensorView,
    read_views,
)

_MAX_DIRECTORY = 2**22
"""Bytes of a zip archive's list of members; PyTorch writes some 100 for a tensor."""

_ENCRYPTED = 0x41
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, ..., lengths of the name and extra field

_TYPES: dict[str, tuple[str, mx.Dtype]] = {
    "torch HalfStorage": ("<f2", mx.float16),
    "torch BFloat16Storage": ("<u2", mx.bfloat16),
    "torch FloatStorage": ("<f4", mx.float32),
    "torch DoubleStorage": ("<f8", mx.float32),
    "torch BoolStorage": ("u1", mx.bool_),
    "torch LongStorage": ("<i8", mx.int64),
    "torch IntStorage": ("<i4", mx.int32),
    "torch ShortStorage": ("<i2", mx.int16),
    "torch CharStorage": ("i1", mx.int8),
    "torch ByteStorage": ("u1", mx.uint8),
}
"""How numbers are stored, and what they become; a GPU has no double."""


@dataclass(frozen=True)
class TorchFile:
    """What a file says of its tensors.

    starts: where each storage's numbers begin in the file, by its key
    """

    path: Path
    views: Mapping[str, TensorView]
    starts: Mapping[str, int]

    def read(self) -> dict[str, mx.array]:
        """All arrays; tensors that are one in the file are one here."""
        arrays: dict[TensorView, mx.array] = {}
        for view in self.views.values():
            if view not in arrays:
                arrays[view] = _array(self.path, self.starts[view.storage.key], view)
        return {name: arrays[view] for name, view in self.views.items()}


def open_torch_file(path: Path) -> TorchFile:
    """Read what a file holds, and make sure that every tensor lies inside of it.

    Raises DamagedFileError, naming the file, for anything but tensors in an archive of PyTorch's.
    """
    try:
        with _File(path) as file:
            return _open(path, file)
    except RefusedError as error:
        raise DamagedFileError(f"{path} is refused: {error}") from None


class _File(FileIO):
    """A file that gives no more than a short list of members at a time."""

    def read(self, size: int | None = -1, /) -> bytes:
        wanted = _MAX_DIRECTORY + 1 if size is None or size < 0 else size
        content = super().read(min(wanted, _MAX_DIRECTORY + 1)) or b""
        if len(content) > _MAX_DIRECTORY:
            raise RefusedError("its list of members is too long")
        return content


def _open(path: Path, file: _File) -> TorchFile:
    members = _members(file)
    pickles = [name for name in members if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise RefusedError("it is no file of PyTorch's (it holds no NAME/data.pkl, or several)")
    folder = pickles[0].removesuffix("data.pkl")
    order = members.get(f"{folder}byteorder")
    if order is not None and _content(file, order, 16) != b"little":
        raise RefusedError("its numbers are not in little-endian order")
    views = read_views(_content(file, members[pickles[0]], MAX_BYTES))
    starts: dict[str, int] = {}
    for storage in {view.storage for view in views.values()}:
        member = members.get(f"{folder}data/{storage.key}")
        if member is None:
            raise RefusedError(f"storage {storage.key!r:.80} is missing")
        if storage.size * STORAGES[storage.kind] != member.file_size:
            raise RefusedError(
                f"storage {storage.key!r:.80} has {member.file_size} bytes, not "
                f"{storage.size * STORAGES[storage.kind]}"
            )
        starts[storage.key] = _start(file, member)
    _check_apart(views, starts)
    return TorchFile(path, views, starts)


def _members(file: _File) -> dict[str, zipfile.ZipInfo]:
    """The archive's members by their names, none of them compressed or encrypted."""
    if file.read(2) != b"PK":
        raise RefusedError(
            "it is no zip archive, which PyTorch writes since 1.6; look for the same weights in "
            "safetensors, or save them again with a newer PyTorch"
        )
    try:
        with zipfile.ZipFile(file) as archive:
            infos = archive.infolist()
    except (
        zipfile.BadZipFile,
        NotImplementedError,
        ValueError,
        struct.error,
        LookupError,
    ) as error:
        raise RefusedError(f"its zip archive is damaged or truncated ({error!s:.80})") from None
    members: dict[str, zipfile.ZipInfo] = {}
    for info in infos:
        name = info.filename
        if name in members:
            raise RefusedError(f"it holds {name!r:.80} twice")
        if name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/"):
            raise RefusedError(f"it holds {name!r:.80}, a path out of the archive")
        if info.flag_bits & _ENCRYPTED:
            raise RefusedError(f"{name!r:.80} in it is encrypted")
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise RefusedError(f"{name!r:.80} in it is compressed, which PyTorch never does")
        members[name] = info
    return members


def _start(file: _File, member: zipfile.ZipInfo) -> int:
    """Where a member's content begins, all of which is inside of the file."""
    size = file.seek(0, 2)
    header = b""
    if 0 <= member.header_offset < size:
        file.seek(member.header_offset)
        header = file.read(_LOCAL_HEADER.size)
    if len(header) < _LOCAL_HEADER.size or not header.startswith(b"PK\3\4"):
        raise RefusedError(f"{member.filename!r:.80} is not where its archive says")
    _, name, extra = _LOCAL_HEADER.unpack(header)
    start = int(member.header_offset + _LOCAL_HEADER.size + name + extra)
    if start + member.file_size > size:
        raise RefusedError(f"it is truncated ({member.filename!r:.80} ends beyond it)")
    return start


def _content(file: _File, member: zipfile.ZipInfo, most: int) -> bytes:
    if member.file_size > most:
        raise RefusedError(f"{member.filename!r:.80} in it is larger than {most} bytes")
    file.seek(_start(file, member))
    return file.read(member.file_size)


def _check_apart(views: Mapping[str, TensorView], starts: Mapping[str, int]) -> None:
    """Refuse storages that lie over one another, which would make much of a small file."""
    storages = {view.storage.key: view.storage for view in views.values()}
    end = 0
    for key in sorted(starts, key=lambda key: starts[key]):
        if starts[key] < end:
            raise RefusedError(f"storage {key!r:.80} lies over another")
        end = starts[key] + _nbytes(storages[key])


def _nbytes(storage: Storage) -> int:
    return storage.size * STORAGES[storage.kind]


def _array(path: Path, start: int, view: TensorView) -> mx.array:
    stored, dtype = _TYPES[view.storage.kind]
    kind = np.dtype(stored)
    numbers = np.fromfile(path, kind, view.span, offset=start + view.offset * kind.itemsize)
    if len(numbers) < view.span:
        raise DamagedFileError(f"{path} was cut off while it was read")
    strides = tuple(stride * kind.itemsize for stride in view.strides)
    laid_out = np.lib.stride_tricks.as_strided(numbers, view.shape, strides, writeable=False)
    if dtype == mx.bool_:
        laid_out = laid_out != 0
    array = mx.array(np.ascontiguousarray(laid_out).reshape(view.shape))
    return array.view(dtype) if dtype == mx.bfloat16 else array.astype(dtype)
