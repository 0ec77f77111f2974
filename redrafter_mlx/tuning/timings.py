"""Times of the target's calls and of drafting, measured on one setup."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Literal

import mlx.core as mx
import mlx.nn as nn

from redrafter_mlx.cpu.blas import BLAS
from redrafter_mlx.runtime.device import chip_name, dtype_name, system_name
from redrafter_mlx.runtime.launched import launch_name
from redrafter_mlx.target_model.fingerprint import shapes_hash
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.version import __version__

SHORT_CONTEXT, LONG_CONTEXT = 128, 2048
"""Committed tokens at which calls are timed; attention is linear between and beyond them."""

MAX_SPREAD = 1 / 3
"""Maximum typical difference of repeats: others would poison every later choice (test_tune)."""

Case = tuple[Literal["call", "draft", "overhead"], int, int]
"""What is timed: ("call", query rows, context), ("draft", B * W, L) or ("overhead", W, L)."""


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


@dataclass(frozen=True)
class Timings:
    """Times measured together on one setup; empty if nothing was measured.

    seconds: by case
    spread:  typical relative difference of the repeats of one case
    """

    setup: Setup
    seconds: dict[Case, float] = field(default_factory=dict)
    spread: float = 0.0

    @property
    def usable(self) -> bool:
        """Whether the machine was quiet enough while they were measured."""
        return self.spread <= MAX_SPREAD

    @property
    def key(self) -> str:
        """The same for the same measured seconds: corrections of others say nothing about these."""
        return hashlib.sha256(repr(sorted(self.seconds.items())).encode()).hexdigest()[:16]
