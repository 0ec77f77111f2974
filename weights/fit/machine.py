"""Properties of the machine that decide which models fit: memory, free disk, and device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from redrafter_mlx.runtime.device import backend, memory_limit, physical_memory
from redrafter_mlx.runtime.paths import free_disk


@dataclass(frozen=True)
class Machine:
    """Memory and disk space in bytes.

    memory:      of the whole machine
    working_set: part of the memory that models and their caches may take
    free_disk:   free space for downloads from the Hub
    on_cpu:      weights are dequantised to float32 unless `quantize` keeps them, see precision.py
    """

    memory: int
    working_set: int
    free_disk: int
    on_cpu: bool


def this_machine() -> Machine:
    """Return the properties of this machine."""
    return Machine(
        memory=physical_memory(),
        working_set=memory_limit(),
        free_disk=free_disk(Path(constants.HF_HUB_CACHE)),
        on_cpu=backend() == "cpu",
    )
