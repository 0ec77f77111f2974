"""The default device: its name, for records, its memory, its precision, and who may compute.

A fork does not copy MLX's threads: a forked process that computes would wait for them forever, and
so would a thread for itself.
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading
from collections.abc import Callable, Iterator

import mlx.core as mx

from redrafter_mlx.errors import BadInputError, ForkedProcessError
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


class WiredMemory:
    """Metal's wired limit, raised while at least one answer is being generated.

    As in mlx-lm, the limit is the working set that the driver recommends. It has an effect from
    macOS 15 on.
    """

    def __init__(self) -> None:
        self._users = 0
        self._lock = threading.Lock()
        self._before: int | None = None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep memory resident while an answer is being generated."""
        with self._lock:
            if self._users == 0:
                recommended = mx.device_info().get("max_recommended_working_set_size")
                if isinstance(recommended, int):
                    self._before = mx.set_wired_limit(recommended)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0 and self._before is not None:
                    mx.synchronize()  # the limit must not change during a computation
                    mx.set_wired_limit(self._before)


WIRED_MEMORY = WiredMemory()
"""One instance per process, because the limit is per process: all models share the user count."""


class MLXProcess:
    """Remembers which process first computed with MLX: this one, or one it was forked from."""

    def __init__(self) -> None:
        self._pid: int | None = None

    def check(self) -> None:
        """Call before MLX computes; raises ForkedProcessError if it computed before a fork."""
        if self._pid is None:
            self._pid = os.getpid()
        elif self._pid != os.getpid():
            raise ForkedProcessError(
                "MLX was used before this process was forked, and cannot be used after; start "
                'processes with multiprocessing.get_context("spawn"), and load the model in them'
            )


MLX_PROCESS = MLXProcess()


class ModelLock:
    """Lets one thread at a time compute with a model, and none in a forked process.

    A waiting thread gets the lock before the thread that has just released it. The thread that
    holds it is refused: it would wait for itself.
    """

    def __init__(self) -> None:
        self._lock, self._next = threading.Lock(), threading.Lock()
        self._holder: int | None = None

    @property
    def held_here(self) -> bool:
        """Whether the caller's thread holds it."""
        return self._holder == threading.get_ident()

    def check(self) -> None:
        """Raise ForkedProcessError in a fork, and BadInputError in the thread that holds it."""
        MLX_PROCESS.check()  # first: after a fork, the thread that holds the lock may be gone
        if self.held_here:
            raise called_by_itself()

    def __enter__(self) -> None:
        self.check()
        with self._next:
            self._lock.acquire()
        self._holder = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._holder = None
        self._lock.release()


def called_by_itself() -> BadInputError:
    """Return the error of a call that would wait for its own thread."""
    return BadInputError(
        "a callback or constraint of an answer called the model that computes the answer, in the "
        "engine's own thread; call it from another thread, after the callback"
    )
