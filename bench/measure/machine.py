"""Description of a measurement's setup: the machine, the versions, and hashes of the weights."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata

import mlx.core as mx

from redrafter_mlx.cpu.blas import BLAS
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.runtime.device import chip_name, dtype_name, float32_is_exact, system_name
from redrafter_mlx.target_model.fingerprint import values_hash
from redrafter_mlx.version import __version__


@dataclass(frozen=True)
class Machine:
    """The machine and the versions."""

    chip: str
    device: str  # MLX's default device, "gpu" or "cpu"
    cores: int | None
    os: str
    python: str
    redrafter_mlx: str
    mlx: str
    mlx_lm: str
    blas: str  # library of matrix products on the CPU

    @classmethod
    def here(cls) -> Machine:
        device = mx.default_device()
        return cls(
            chip=chip_name(),
            device=device.type.name,
            cores=os.cpu_count(),
            os=system_name(),
            python=platform.python_version(),
            redrafter_mlx=__version__,
            mlx=metadata.version("mlx"),
            mlx_lm=metadata.version("mlx-lm"),
            blas=BLAS.note,
        )


@dataclass(frozen=True)
class LoadedModel:
    """The target as it was loaded, with one of its drafters."""

    dtype: str  # as given by the user
    model: str
    model_hash: str | None  # see TargetSource; None for a model that was not loaded by name
    arithmetic: str  # such as "float32", or "float32, 8-bit keys and values"
    bits: int | None  # bits per quantised weight in memory; None if weights are not quantised
    drafter: str | None  # description in words; None if there is none
    drafter_hash: str | None
    named: str | None = None  # the user's name for the drafter, if there are several drafters
    tf32: bool = False  # whether float32 products are rounded to TF32 on this machine
    ranks: int = 1  # number of processes that share the target

    @classmethod
    def of(cls, redrafter: Redrafter, dtype: str, named: str | None = None) -> LoadedModel:
        source = redrafter.source
        modules = redrafter.drafter.modules if redrafter.drafter else ()
        arithmetic = source.dtype if source else dtype_name(redrafter.target.dtype)
        if (packing := redrafter.target.packing) is not None:
            arithmetic += f", {packing.label}"
        return cls(
            dtype=dtype,
            model=source.name if source else redrafter.target.model_type,
            model_hash=source.fingerprint if source else None,
            arithmetic=arithmetic,
            bits=source.bits if source else None,
            drafter=redrafter.drafting,
            drafter_hash=values_hash(*modules) if modules else None,
            named=named,
            tf32=not float32_is_exact(),
            ranks=1 if redrafter.mirror is None else redrafter.mirror.ranks.size,
        )

    @property
    def drafts(self) -> str:
        """Description of the drafter: its name if there are several, its kind, its hash."""
        return " ".join(filter(None, (self.named, self.drafter or "none", self.drafter_hash)))

    @property
    def exact(self) -> bool:
        """Whether the output must equal the baseline's: all arithmetic is float32, not TF32."""
        return self.arithmetic == "float32" and self.bits is None and not self.tf32
