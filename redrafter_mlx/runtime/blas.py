"""Load an optimised BLAS for MLX's CPU backend on Linux, before MLX itself.

MLX's CPU wheel links the reference BLAS. The loader resolves its symbols by name, so it takes them
from a library that is already in the process with global visibility.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import metadata
from pathlib import Path

from redrafter_mlx.errors import RedrafterError
from redrafter_mlx.runtime.atomic_write import write_private_text
from redrafter_mlx.runtime.environment import environment
from redrafter_mlx.runtime.launched import launched_rank
from redrafter_mlx.runtime.paths import cache_dir

_PACKAGE, _PACKAGED_LIBRARY = "mkl", "libmkl_rt.so"
"""A package on PyPI, and the start of its library's file name."""

_SYSTEM_LIBRARIES = ("libopenblas.so.0", "libblis.so.4", "libmkl_rt.so.3", "libmkl_rt.so.2")

THREAD_VARIABLES = tuple(f"{name}_NUM_THREADS" for name in ("MKL", "OPENBLAS", "BLIS", "OMP"))
"""If one of these is in the environment, its number of threads is always used."""

_SETTERS = {
    "MKL_Set_Num_Threads": ctypes.c_int,
    "openblas_set_num_threads": ctypes.c_int,
    "bli_thread_set_num_threads": ctypes.c_int64,
}
"""Each library's function that sets the number of threads; BLIS uses one until it is called."""

_AWAKE = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "300000"}
"""How the threads of GNU's OpenMP wait between products. By default they sleep after 300,000 rounds
of a loop. But once two threads of a process have multiplied, it counts more threads than cores,
and they sleep after 100 rounds; with the first variable after 1,000. Waking one takes longer than
multiplying a few rows: calls of BLIS with several rows would take twice as long, and with the
variable still a quarter longer. So one thread computes (`engine/thread.py`)."""

_MAX_SLOWDOWN = 1.15
"""Maximum slowdown of two-row products with one core fewer, which leaves that core to the host."""

_LEAST_REPEATS, _MOST_REPEATS, _CLEAR_SLOWDOWN = 4, 8, 1.4
"""How often the products are timed, and from which slowdown on not again. On two cores of an AMD
EPYC, one fewer takes 1.7 to 2.3 times as long with BLIS, and 0.95 to 1.09 times with MKL."""

_MATRIX = (4096, 2048)
"""Shape of the matrix in the timed product: larger than caches, but read in a few milliseconds."""


@dataclass(frozen=True)
class BlasStatus:
    """The library that computes MLX's matrix products on the CPU.

    library: path or soname that was loaded, None for MLX's own
    note: one line for `doctor`: where the library came from, or why there is none
    """

    library: str | None
    note: str

    @contextmanager
    def threads_by_rows(self) -> Iterator[None]:
        """Context for calls of `prepare_for`; all cores are used before and after it.

        What they need is measured here, if it was not before, while no product is in flight: one
        would take a core from the products that are timed.
        """
        self.use_all_cores()
        try:
            _ = self._few_rows_threads
            yield
        finally:
            self.use_all_cores()

    @contextmanager
    def shared_by(self, processes: int) -> Iterator[None]:
        """Context in which this process uses as many threads as each of several busy ones has."""
        self._use(max(1, self._cores // processes))
        try:
            yield
        finally:
            self.use_all_cores()

    def prepare_for(self, rows: int) -> None:
        """Set the number of threads that suits products of `rows` query rows.

        Products of two to four rows take as long as reading the matrix. If one core fewer reads it
        about as fast, that core is left to the host, which builds and submits the next step.
        """
        self._use(self._few_rows_threads if 2 <= rows <= 4 else self._cores)

    def use_all_cores(self) -> None:
        """Use all cores, the initial state: for the long products of prefill and training."""
        self._use(self._cores)

    def _use(self, threads: int) -> None:
        library = self._handle
        if library is None or self._fixed:
            return
        for name, kind in _SETTERS.items():
            if hasattr(library, name):
                getattr(library, name)(kind(threads))

    @cached_property
    def _cores(self) -> int:
        if sys.platform == "linux":
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1

    @property
    def _fixed(self) -> bool:
        """Whether the environment sets the number of threads."""
        return any(os.environ.get(name) for name in THREAD_VARIABLES)

    @cached_property
    def _few_rows_threads(self) -> int:
        """All cores but one if two-row products are about as fast with that, else all cores."""
        library, most = self._handle, self._cores
        if library is None or self._fixed or most == 1 or not hasattr(library, "cblas_sgemm"):
            return most
        few, all_of_them = partial(self._use, most - 1), partial(self._use, most)
        # In a thread that ends: the library's workers for it, awake, would take turns with others.
        with ThreadPoolExecutor(1) as thread:
            slowdown = thread.submit(_slowdown, library, few, all_of_them).result()
        return most - 1 if slowdown < _MAX_SLOWDOWN else most

    @cached_property
    def _handle(self) -> ctypes.CDLL | None:
        return None if self.library is None else ctypes.CDLL(self.library)


def _slowdown(
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
    for repeat in range(_MOST_REPEATS):
        for use, taken in zip(settings, times, strict=True):
            use()
            began = time.perf_counter()
            # Row-major, the second factor transposed, as MLX calls it for a linear layer.
            library.cblas_sgemm(101, 111, 112, 2, n, k, one, a, k, b, k, zero, c, n)
            taken.append(time.perf_counter() - began)
        slowdown = min(times[0]) / min(times[1])
        if repeat + 1 >= _LEAST_REPEATS and slowdown > _CLEAR_SLOWDOWN:
            break
    return slowdown


def load_optimised_blas() -> BlasStatus:
    """Load the `cpu` extra's or the system's BLAS into this process, if there is one.

    Other systems keep MLX's own (Accelerate on macOS), and a missing library is only noted.
    REDRAFTER_BLAS names another library, or `none` to keep MLX's own. Without it, the library set
    by `prefer_library` is tried first.
    """
    if sys.platform != "linux":
        return BlasStatus(None, "Accelerate" if sys.platform == "darwin" else "MLX's own")
    wanted = os.environ.get("REDRAFTER_BLAS")
    if wanted == "none":
        return BlasStatus(None, "MLX's own, as REDRAFTER_BLAS=none asks")
    if "mlx.core" in sys.modules:
        return BlasStatus(None, "MLX was imported before redrafter_mlx, too late for another BLAS")
    if launched_rank() is not None:  # idle threads would keep cores from the ranks' exchange
        os.environ.setdefault("KMP_BLOCKTIME", "0")
    preferred = preferred_library()
    usual = _candidates() if preferred is None else [preferred, *_candidates()]
    for candidate in [wanted] if wanted else usual:
        try:
            with environment(_waiting()):  # other libraries and child processes keep their own
                ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        chosen = ", the fastest in `redrafter-mlx tune`" if candidate == preferred else ""
        status = BlasStatus(candidate, candidate + chosen)
        status.use_all_cores()
        return status
    if wanted:
        return BlasStatus(None, f"MLX's own: REDRAFTER_BLAS={wanted} could not be loaded")
    return BlasStatus(None, f"MLX's own reference BLAS, slow; {remedy()}")


def _waiting() -> Mapping[str, str]:
    """Return the variables by which GNU's OpenMP, while it is loaded, learns to wait awake.

    Empty if the environment says how, or in a rank, which shares the cores with other processes.
    """
    if launched_rank() is not None or any(name in os.environ for name in _AWAKE):
        return {}
    return _AWAKE


def remedy() -> str:
    """How to install an optimised BLAS on this machine, in one line."""
    if platform.machine() == "x86_64":
        return "pip install 'redrafter-mlx[cpu]', or Debian's libopenblas0, makes it far faster"
    return "the system's OpenBLAS (Debian: apt install libopenblas0) makes it far faster"


def libraries_here() -> list[str]:
    """Return the optimised libraries that can be loaded on this machine, each once."""
    found: dict[int, str] = {}  # by the loader's handle: a library may have several names
    for candidate in _candidates():
        with suppress(OSError):
            found.setdefault(ctypes.CDLL(candidate)._handle, candidate)
    return [*found.values()]


def preferred_library() -> str | None:
    """Return the library set by `prefer_library`; None if there is none."""
    try:
        return _preference().read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError, RedrafterError):  # treated as missing
        return None


def prefer_library(library: str) -> None:
    """Make later processes load this library."""
    write_private_text(_preference(), library + "\n")


def _preference() -> Path:
    return cache_dir() / "blas.txt"


def _candidates() -> Iterator[str]:
    """Yield libraries to try: the one in this interpreter's PyPI package, then the system's."""
    with suppress(metadata.PackageNotFoundError):
        for file in metadata.files(_PACKAGE) or ():
            if file.name.startswith(_PACKAGED_LIBRARY) and ".so." in file.name:
                yield os.path.realpath(file.locate())
    yield from _SYSTEM_LIBRARIES


BLAS = load_optimised_blas()
"""The BLAS of this process; `redrafter-mlx doctor` prints it."""
