"""Load an optimised BLAS for MLX's CPU backend on Linux, before MLX itself.

MLX's CPU wheel links the reference BLAS. The loader resolves its symbols by name, so it takes them
from a library that is already in the process with global visibility.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from redrafter_mlx.errors import RedrafterError
from redrafter_mlx.runtime.files.atomic_write import write_private_text
from redrafter_mlx.runtime.files.paths import cache_dir
from redrafter_mlx.runtime.processes.environment import environment
from redrafter_mlx.runtime.processes.launched import launched_rank

_PACKAGE, _PACKAGED_LIBRARY = "mkl", "libmkl_rt.so"
"""A package on PyPI, and the start of its library's file name."""

_SYSTEM_LIBRARIES = ("libopenblas.so.0", "libblis.so.4", "libmkl_rt.so.3", "libmkl_rt.so.2")

_STARTS_OPENMP = "MKL_Get_Max_Threads"
"""MKL's function that starts its OpenMP, which sets a variable of the environment. If the first
product did, in MLX's thread, it could move the environment away from a compiler that is being
started for a kernel ("popen() failed")."""

THREAD_VARIABLES = tuple(f"{name}_NUM_THREADS" for name in ("MKL", "OPENBLAS", "BLIS", "OMP"))
"""If one of these is in the environment, its number of threads is always used."""

_AWAKE = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "300000"}
"""How the threads of GNU's OpenMP wait between products. By default they sleep after 300,000 rounds
of a loop. But once two threads of a process have multiplied, it counts more threads than cores,
and they sleep after 100 rounds; with the first variable after 1,000. Waking one takes longer than
multiplying a few rows: calls of BLIS with several rows would take twice as long, and with the
variable still a quarter longer. So one thread computes (`engine/thread.py`)."""


@dataclass(frozen=True)
class BlasStatus:
    """The library that computes MLX's matrix products on the CPU.

    library: path or soname that was loaded, None for MLX's own
    note: one line for `doctor`: where the library came from, or why there is none
    """

    library: str | None
    note: str


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
                library = ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        if hasattr(library, _STARTS_OPENMP):
            getattr(library, _STARTS_OPENMP)()
        chosen = ", the fastest in `redrafter-mlx tune`" if candidate == preferred else ""
        return BlasStatus(candidate, candidate + chosen)
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
