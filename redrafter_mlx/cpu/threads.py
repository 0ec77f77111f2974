"""How many threads the BLAS of this process multiplies with."""

from __future__ import annotations

import ctypes
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

from redrafter_mlx.cpu.blas import BLAS, THREAD_VARIABLES

_SETTERS = {
    "MKL_Set_Num_Threads": ctypes.c_int,
    "openblas_set_num_threads": ctypes.c_int,
    "bli_thread_set_num_threads": ctypes.c_int64,
}
"""Each library's function that sets the number of threads; BLIS uses one until it is called."""

_MAX_SLOWDOWN = 1.15
"""Maximum slowdown of two-row products with one core fewer, which leaves that core to the host."""

_MIN_REPEATS, _MAX_REPEATS, _CLEAR_SLOWDOWN = 4, 8, 1.4
"""How often the products are timed, and from which slowdown on not again. On two cores of an AMD
EPYC, one fewer takes 1.7 to 2.3 times as long with BLIS, and 0.95 to 1.09 times with MKL."""

_MATRIX = (4096, 2048)
"""Shape of the matrix in the timed product: larger than caches, but read in a few milliseconds."""


class Threads:
    """Sets the number of threads of a library; does nothing for None, which is MLX's own.

    cores: number of processor cores that this process uses
    """

    def __init__(self, library: str | None) -> None:
        self.cores = _cores()
        self._library = None if library is None else ctypes.CDLL(library)
        self._max_slowdown: float | None = None  # measured so far
        self._uses = 0
        self._setters: list[Callable[[int], object]] = []
        for name, kind in _SETTERS.items():
            if hasattr(self._library, name) and not any(map(os.environ.get, THREAD_VARIABLES)):
                setter = getattr(self._library, name)
                setter.argtypes = [kind]
                self._setters.append(setter)

    def use_all_cores(self) -> None:
        """Use all cores, the initial state: for the long products of prefill and training."""
        self._use(self.cores)

    def prepare_for(self, rows: int) -> None:
        """Set the number of threads that suits products of `rows` query rows.

        Products of two to four rows take as long as reading the matrix. If one core fewer reads it
        about as fast, that core is left to the host, which builds and submits the next step.
        """
        spared = 2 <= rows <= 4 and self.cores > 1 and self.spares_a_core
        self._use(self.cores - spared)

    @contextmanager
    def by_rows(self) -> Iterator[None]:
        """Context for calls of `prepare_for`; all cores are used before and after it.

        What they need is measured here, while no product is in flight: one would take a core from
        the products that are timed. On a busy machine a core fewer seems to be enough, so what
        says so is measured again at the second use, the fourth, the eighth and so on.
        """
        self.use_all_cores()
        try:
            self._uses += 1
            found = self._max_slowdown
            if self._uses & (self._uses - 1) == 0 and (found is None or found < _MAX_SLOWDOWN):
                self._measure()
            yield
        finally:
            self.use_all_cores()

    def _use(self, threads: int) -> None:
        for setter in self._setters:
            setter(threads)

    @property
    def spares_a_core(self) -> bool:
        """Whether two-row products are about as fast with one core fewer."""
        found = self._measure() if self._max_slowdown is None else self._max_slowdown
        return found < _MAX_SLOWDOWN

    def _measure(self) -> float:
        """Measure the slowdown with one core fewer; other work can only make it seem smaller."""
        library, cores, found = self._library, self.cores, math.inf
        if library is not None and self._setters and cores > 1 and hasattr(library, "cblas_sgemm"):
            few, all_of_them = partial(self._use, cores - 1), partial(self._use, cores)
            # In a thread that ends: its workers, awake, would take turns with those of others.
            with ThreadPoolExecutor(1) as thread:
                found = thread.submit(slowdown, library, few, all_of_them).result()
        self._max_slowdown = max(self._max_slowdown or 0.0, found)
        return self._max_slowdown


def _cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def slowdown(
    library: ctypes.CDLL, few: Callable[[], None], all_of_them: Callable[[], None]
) -> float:
    """Return the time of a two-row product in one setting as a multiple of that in the other.

    Other work of the machine can only make many threads seem less useful than they are, so the
    shortest times count, and only a small slowdown is measured again.
    """
    (n, k), settings = _MATRIX, (few, all_of_them)
    times: tuple[list[float], list[float]] = ([], [])
    a, b, c = ((ctypes.c_float * size)() for size in (2 * k, n * k, 2 * n))
    for given in (a, b):
        ctypes.memset(given, 0x3C, ctypes.sizeof(given))  # 0.0115: neither zero nor subnormal
    one, zero = ctypes.c_float(1), ctypes.c_float(0)
    slowdown = 0.0
    for repeat in range(_MAX_REPEATS):
        for use, taken in zip(settings, times, strict=True):
            use()
            began = time.perf_counter()
            # Row-major, the second factor transposed, as MLX calls it for a linear layer.
            library.cblas_sgemm(101, 111, 112, 2, n, k, one, a, k, b, k, zero, c, n)
            taken.append(time.perf_counter() - began)
        slowdown = min(times[0]) / max(min(times[1]), 1e-9)  # the clock may be coarse
        if repeat + 1 >= _MIN_REPEATS and slowdown > _CLEAR_SLOWDOWN:
            break
    return slowdown


THREADS = Threads(BLAS.library)
"""The threads of this process's BLAS."""
