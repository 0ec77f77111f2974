"""The default device: its name, for records of measurements, its memory and its precision."""

from __future__ import annotations

import platform
from collections.abc import Callable

import mlx.core as mx

from redrafter_mlx.runtime.hardware import physical_memory


def chip_name() -> str:
    """Return the default device's name, such as `Apple M2 Ultra`."""
    name = mx.device_info(mx.default_device()).get("device_name", platform.machine())
    return str(name)


def backend() -> str:
    """Return the default device's backend: "cpu", "apple" (Metal) or "cuda"."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "apple" if mx.metal.is_available() else "cuda"


def system_name() -> str:
    """Return the operating system, such as `macOS 15.1` or `Linux x86_64`."""
    mac = platform.mac_ver()[0]
    return f"macOS {mac}" if mac else f"{platform.system()} {platform.machine()}"


def dtype_name(dtype: mx.Dtype) -> str:
    """Return a type's name as options and file formats spell it, such as `float16`."""
    return str(dtype).removeprefix("mlx.core.")


def memory_limit() -> int:
    """Return the bytes that models and their caches may take.

    On an Apple GPU it is the driver's advice, on CUDA most of the card's memory, which MLX's
    allocator takes too, and on a CPU three quarters of the machine's.
    """
    device = mx.default_device()
    info = mx.device_info(device)
    recommended, total = info.get("max_recommended_working_set_size"), info.get("total_memory")
    if isinstance(recommended, int):
        return recommended
    if device.type == mx.DeviceType.gpu and isinstance(total, int):
        return total * 9 // 10
    return physical_memory() * 3 // 4


def float32_is_exact() -> bool:
    """Whether products of float32 matrices keep float32 precision on the default device.

    On CUDA, and on Apple GPUs from the M5 on, MLX rounds factors to TF32, 10 bits after the point,
    unless MLX_ENABLE_TF32 is 0 at the first product of a process. On a CPU there is nothing to
    test, and a product would give its thread workers of the BLAS; see `EngineThread`.
    """
    return backend() == "cpu" or keeps_float32(mx.matmul)


def keeps_float32(multiply: Callable[[mx.array, mx.array], mx.array]) -> bool:
    """Whether a product is exact whose factors need 12 bits after the point."""
    fine = mx.full((256, 256), 1 + 2**-12)
    return bool(mx.array_equal(multiply(fine, mx.eye(256)), fine).item())
