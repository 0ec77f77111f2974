"""Disk cache of weights that were quantised at loading, so that the next load only reads them.

Its folder is `quantised/` in our cache. A file is used only for the same model, bits and dtype.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from redrafter_mlx.errors import DamagedFileError
from redrafter_mlx.runtime.files.atomic_write import atomic_write, remove_abandoned
from redrafter_mlx.runtime.files.paths import cache_dir, free_disk
from redrafter_mlx.weights.files.folder import read_safetensors_header
from redrafter_mlx.weights.files.names import MODEL_WEIGHTS
from redrafter_mlx.weights.fit.model_size import GROUP_SIZE
from redrafter_mlx.weights.precision import Precision

WORTH_KEEPING = 64_000_000
"""Minimum size of cached weights in bytes; less is quantised again in a moment."""

SHARE_OF_DISK = 0.5
"""Maximum share of the free disk that one file may take."""


def quantised_file(model: Path, fingerprint: str, precision: Precision) -> Path:
    """Return the path of quantised weights, another one once the model is written anew."""
    files = [model] if model.is_file() else sorted(model.glob(MODEL_WEIGHTS))
    written = [(file.name, file.stat().st_mtime_ns) for file in files]
    key = f"{fingerprint} {written} {precision.bits} bits by {GROUP_SIZE} {precision.dtype}"
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    return cache_dir() / "quantised" / f"{name}.safetensors"


def use_quantised(model: nn.Module, path: Path) -> bool:
    """Make an unevaluated model read its weights from an undamaged `path`; whether it does."""
    wanted = {name: array.shape for name, array in _arrays(model).items()}
    try:
        if not path.exists() or read_safetensors_header(path).shapes != wanted:
            return False
        found = mx.load(str(path))
    except (DamagedFileError, OSError, RuntimeError):
        return False
    assert isinstance(found, dict)
    model.load_weights([*found.items()], strict=True)
    return True


def keep_quantised(model: nn.Module, path: Path) -> None:
    """Write the weights of an evaluated model; do nothing if it is small or disk space is low."""
    arrays = _arrays(model)
    size = sum(array.nbytes for array in arrays.values())
    if size < WORTH_KEEPING:
        return
    with contextlib.suppress(OSError):  # a cache that cannot be written is no error
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(path.parent.glob(".*.safetensors"))
        if size > SHARE_OF_DISK * free_disk(path.parent):
            return
        with atomic_write(path) as partial:
            mx.save_safetensors(str(partial), arrays)


def _arrays(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))
