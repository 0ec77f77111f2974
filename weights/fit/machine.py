"""Properties of the machine that decide which models fit: memory, free disk, and device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from redrafter_mlx.runtime.files.paths import free_disk
from redrafter_mlx.runtime.hardware import gpu_memory, physical_memory


@dataclass(frozen=True)
class Machine:
    """Memory and disk space in bytes."""

    memory: int  # of the whole machine
    working_set: int  # part of the memory that models and their caches may take
    free_disk: int  # free space for downloads from the Hub
    on_cpu: bool  # weights become float32 unless `quantize` keeps them, see precision.py


def this_machine() -> Machine:
    """Return the properties of this machine, as MLX finds them."""
    from redrafter_mlx.runtime.device import backend, memory_limit

    return Machine(
        memory=physical_memory(),
        working_set=memory_limit(),
        free_disk=free_disk(Path(constants.HF_HUB_CACHE)),
        on_cpu=backend() == "cpu",
    )


def planned_machine() -> Machine:
    """Return the properties of this machine without importing MLX, for lists and plans."""
    memory, on_gpu = physical_memory(), gpu_memory()
    return Machine(
        memory=memory,
        working_set=memory * 3 // 4 if on_gpu is None else on_gpu,
        free_disk=free_disk(Path(constants.HF_HUB_CACHE)),
        on_cpu=on_gpu is None,
    )
