"""Setup: the models and the machine that measured times hold for."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from importlib import metadata

import mlx.core as mx
import mlx.nn as nn

from redrafter_mlx.cpu.blas import BLAS
from redrafter_mlx.runtime.device import chip_name, dtype_name, system_name
from redrafter_mlx.runtime.processes.launched import launch_name
from redrafter_mlx.target_model.fingerprint import shapes_hash
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.version import __version__


@dataclass(frozen=True)
class Setup:
    """The models and the machine that were measured; times are reused only if all fields are equal.

    chip:    the device's name
    model:   fingerprint of the target's tensors: names, shapes and types
    drafter: the same of the drafter, or its kind if it has no tensors
    dtype:   type of the target's hidden states, and the bits of quantised keys and values
    mlx:     MLX's version
    others:  the system, and the versions of mlx-lm and this package
    blas:    the library of matrix products on a CPU
    launch:  how ranks share the target, see `launch_name`
    """

    chip: str
    model: str
    drafter: str
    dtype: str
    mlx: str
    blas: str
    launch: str = ""
    others: str = ""

    @property
    def key(self) -> str:
        """The name of the files about it."""
        fields = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(fields.encode()).hexdigest()[:32]


def setup_of(model: nn.Module, target: Target, drafter: str) -> Setup:
    """Return the setup that times hold for; `drafter` is equal for drafters with equal times."""
    bits = "" if target.packing is None else f", {target.packing.label}"
    return Setup(
        chip=f"{mx.default_device().type.name} {chip_name()}",
        model=f"{target.model_type} {shapes_hash(model)}",
        drafter=drafter,
        dtype=dtype_name(target.dtype) + bits,
        mlx=metadata.version("mlx"),
        blas=BLAS.library or BLAS.note,
        launch=launch_name(),
        others=f"{system_name()}, mlx-lm {metadata.version('mlx-lm')}, {__version__}",
    )
