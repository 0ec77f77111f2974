"""Tensors of a folder's weight files: names and shapes from headers alone, arrays on demand.

Files are safetensors or, if there are none, PyTorch files (see pickles.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from redrafter_mlx.errors import DamagedFileError
from redrafter_mlx.weights.files.folder import read_safetensors_header
from redrafter_mlx.weights.files.names import Needed, weight_files

if TYPE_CHECKING:
    import mlx.core as mx


@dataclass(frozen=True)
class StoredTensors:
    """Description of the tensors in a folder's weight files, shapes by their names."""

    path: Path  # the file, or the folder if there are several, for messages
    files: tuple[Path, ...]
    shapes: Mapping[str, tuple[int, ...]]

    def read(self) -> dict[str, mx.array]:
        """Read all arrays; those of safetensors are read only when they are evaluated.

        Raises DamagedFileError naming the file that cannot be read.
        """
        return {name: array for file in self.files for name, array in _arrays(file).items()}


def open_tensors(folder: Path, of: Needed | None = None) -> StoredTensors:
    """Open the weight files of a folder; safetensors are preferred if there are several sets.

    Raises DamagedFileError, naming the file, if there is none, or one is missing, truncated, or
    holds a tensor that another one holds too.
    """
    try:
        files = weight_files(folder, of)
        path = files[0] if len(files) == 1 else folder
        return StoredTensors(path, tuple(files), _all_shapes(files))
    except OSError as error:
        raise DamagedFileError(f"{folder} cannot be read: {error.strerror or error}") from error


def _all_shapes(files: list[Path]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        for name, shape in _shapes(file).items():
            if not name.isprintable():
                raise DamagedFileError(f"{file} holds a tensor of the name {name!r:.80}")
            if name in shapes:
                raise DamagedFileError(f"{file} holds tensor {name}, which another file holds too")
            shapes[name] = shape
    return shapes


def _shapes(file: Path) -> Mapping[str, tuple[int, ...]]:
    if file.suffix == ".safetensors":
        return read_safetensors_header(file).shapes
    from redrafter_mlx.weights.files.pickles import open_torch_file

    return {name: view.shape for name, view in open_torch_file(file).views.items()}


def _arrays(file: Path) -> dict[str, mx.array]:
    import mlx.core as mx

    if file.suffix != ".safetensors":
        from redrafter_mlx.weights.files.pickles import open_torch_file

        return open_torch_file(file).read()
    try:
        arrays = mx.load(str(file))
    except (RuntimeError, ValueError) as error:
        raise DamagedFileError(f"{file} cannot be read: {error}") from None
    assert isinstance(arrays, dict)
    return arrays
