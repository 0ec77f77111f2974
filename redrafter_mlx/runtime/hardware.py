"""The machine's device and memory, found without MLX: for commands that only list and plan.

MLX asks the driver, see device.py; what is found here is what the driver is known to answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

CUDA_BACKENDS = ("mlx-cuda-13", "mlx-cuda-12")
"""Distributions that hold MLX's backend for CUDA."""

_LARGE_MAC = 36 * 2**30
"""Bytes of memory from which macOS lets a GPU take three quarters of it, instead of two thirds."""


def physical_memory() -> int:
    """Return the machine's bytes of memory, or those that its container may take."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # it is "max" without a limit
        return min(whole, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8")))
    return whole


def gpu_memory() -> int | None:
    """Return the bytes of GPU memory that models may take; None if MLX computes on the CPU."""
    if sys.platform == "darwin":
        return _metal_memory() if platform.machine() == "arm64" else None
    return _cuda_memory() if any(map(_is_installed, CUDA_BACKENDS)) else None


def _metal_memory() -> int:
    """Return the bytes that Metal recommends at most: a share of all, unless a user has set it."""
    size = ctypes.c_size_t(8)
    megabytes = ctypes.c_uint64()
    name = b"iogpu.wired_limit_mb"
    failed = ctypes.CDLL(None).sysctlbyname(
        name, ctypes.byref(megabytes), ctypes.byref(size), None, ctypes.c_size_t(0)
    )
    if not failed and megabytes.value:
        return megabytes.value * 2**20
    memory = physical_memory()
    return memory * 3 // 4 if memory >= _LARGE_MAC else memory * 2 // 3


def _cuda_memory() -> int | None:
    """Return nine tenths of the first card's bytes, as for MLX; None without a card or a driver."""

    class Memory(ctypes.Structure):
        _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]

    card, memory = ctypes.c_void_p(), Memory()
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        failed = (
            nvml.nvmlInit_v2()
            or nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(card))
            or nvml.nvmlDeviceGetMemoryInfo(card, ctypes.byref(memory))
        )
    except (OSError, AttributeError):
        return None
    return None if failed else int(memory.total) * 9 // 10


def _is_installed(distribution: str) -> bool:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return bool(metadata.version(distribution))
    return False
