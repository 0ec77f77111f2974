"""An optimised BLAS for MLX's CPU backend on Linux, loaded before MLX is.

MLX's CPU wheel links the reference BLAS. Its symbols are looked up by name, so a library that
is already in the process with global visibility answers them instead; hence the order.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

_SYSTEM_LIBRARIES = ("libopenblas.so.0", "libmkl_rt.so.3", "libmkl_rt.so.2")


@dataclass(frozen=True)
class BlasStatus:
    """What answers MLX's matrix products on the CPU.

    library: path or soname that was loaded, None for MLX's own
    note: one line for `doctor`: where it came from, or why there is none
    """

    library: str | None
    note: str


def load_optimised_blas() -> BlasStatus:
    """Load the `cpu` extra's or the system's BLAS into this process, if there is one.

    Harmless elsewhere: on macOS MLX uses Accelerate, and a missing library is only noted.
    REDRAFTER_BLAS names another library, or `none` to keep MLX's own.
    """
    if sys.platform != "linux":
        return BlasStatus(None, "Accelerate" if sys.platform == "darwin" else "MLX's own")
    wanted = os.environ.get("REDRAFTER_BLAS")
    if wanted == "none":
        return BlasStatus(None, "MLX's own, as REDRAFTER_BLAS=none asks")
    if "mlx.core" in sys.modules:
        return BlasStatus(None, "MLX was imported before redrafter_mlx, too late for another BLAS")
    for candidate in [wanted] if wanted else _candidates():
        try:
            ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return BlasStatus(candidate, candidate)
    if wanted:
        return BlasStatus(None, f"MLX's own: REDRAFTER_BLAS={wanted} could not be loaded")
    return BlasStatus(None, f"MLX's own reference BLAS, slow; {remedy()}")


def remedy() -> str:
    """The command that brings an optimised BLAS to this machine."""
    if platform.machine() == "x86_64":
        return "pip install 'redrafter-mlx[cpu]', or Debian's libopenblas0, makes it far faster"
    return "the system's OpenBLAS (Debian: apt install libopenblas0) makes it far faster"


def _candidates() -> Iterator[str]:
    """Where to look: MKL from PyPI beside this interpreter's packages, then the system."""
    try:
        for file in metadata.files("mkl") or ():
            if file.name.startswith("libmkl_rt.so"):
                yield os.path.realpath(file.locate())
    except metadata.PackageNotFoundError:
        pass
    yield from _SYSTEM_LIBRARIES
