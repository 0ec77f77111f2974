"""Read the tensors of a `.bin` or `.pt` file written by PyTorch, without PyTorch.

The file is an uncompressed zip archive: `NAME/data.pkl` describes the tensors (tensor_pickle.py
reads it without unpickling it), and `NAME/data/KEY` holds the numbers of one storage. The format of
PyTorch before 1.6 is refused.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from redrafter_mlx.errors import DamagedFileError
from redrafter_mlx.runtime.files.regular_file import check_regular
from redrafter_mlx.weights.files.tensor_pickle import (
    MAX_BYTES,
    STORAGES,
    RefusedError,
    TensorView,
    read_views,
)


@dataclass(frozen=True)
class TorchFile:
    """Description of the tensors in a file."""

    path: Path
    folder: str  # the folder inside the archive that holds all members
    views: Mapping[str, TensorView]

    def read(self) -> dict[str, mx.array]:
        """Read all arrays; names of the same tensor share one array."""
        with _archive(self.path) as archive:
            arrays = {
                view: _array(archive.read(f"{self.folder}data/{view.storage.key}"), view)
                for view in set(self.views.values())
            }
        return {name: arrays[view] for name, view in self.views.items()}


def open_torch_file(path: Path) -> TorchFile:
    """Read the description of a file's tensors, and check that each lies inside the file.

    Raises DamagedFileError, naming the file, for anything but tensors in a PyTorch archive.
    """
    with _archive(path) as archive:
        members = {info.filename: info for info in archive.infolist()}
        pickles = [name for name in members if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise RefusedError("it is no file of PyTorch's (it holds no NAME/data.pkl, or several)")
        folder = pickles[0].removesuffix("data.pkl")
        if any(info.compress_type != zipfile.ZIP_STORED for info in members.values()):
            raise RefusedError("it is compressed, which PyTorch never does")
        if sum(info.file_size for info in members.values()) > path.stat().st_size:
            raise RefusedError("it is truncated, or its members lie over one another")
        if f"{folder}byteorder" in members and archive.read(f"{folder}byteorder") != b"little":
            raise RefusedError("its numbers are not in little-endian order")
        if members[pickles[0]].file_size > MAX_BYTES:
            raise RefusedError(f"{pickles[0]!r:.80} in it is larger than {MAX_BYTES} bytes")
        views = read_views(archive.read(pickles[0]))
        for storage in {view.storage for view in views.values()}:
            member = members.get(f"{folder}data/{storage.key}")
            if member is None:
                raise RefusedError(f"storage {storage.key!r:.80} is missing")
            wanted = storage.size * np.dtype(STORAGES[storage.kind]).itemsize
            if wanted != member.file_size:
                raise RefusedError(
                    f"storage {storage.key!r:.80} has {member.file_size} bytes, not {wanted}"
                )
            archive.open(member).close()  # checks the member's position
        return TorchFile(path, folder, views)


@contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open an archive; any error in it is raised as DamagedFileError, naming the file."""
    check_regular(path)
    with path.open("rb") as file:
        try:
            if file.read(2) != b"PK":
                raise RefusedError(
                    "it is no zip archive, which PyTorch writes since 1.6; look for the same "
                    "weights in safetensors, or save them again with a newer PyTorch"
                )
            with zipfile.ZipFile(file) as archive:
                yield archive
        except RefusedError as error:
            raise DamagedFileError(f"{path} is refused: {error}") from None
        except Exception as error:  # zipfile raises errors of any type on a damaged archive
            raise DamagedFileError(
                f"{path} is refused: its zip archive is damaged or truncated ({error!s:.80})"
            ) from None


def _array(content: bytes, view: TensorView) -> mx.array:
    kind = np.dtype(STORAGES[view.storage.kind])
    numbers = np.frombuffer(content, kind, view.span, offset=view.offset * kind.itemsize)
    strides = tuple(stride * kind.itemsize for stride in view.strides)
    laid_out = np.lib.stride_tricks.as_strided(numbers, view.shape, strides, writeable=False)
    array = mx.array(np.ascontiguousarray(laid_out).reshape(view.shape))
    if view.storage.kind == "torch BFloat16Storage":
        return array.view(mx.bfloat16)
    return array != 0 if view.storage.kind == "torch BoolStorage" else array
