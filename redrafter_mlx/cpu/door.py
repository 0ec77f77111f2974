"""What the rest of the package calls on the room of the CPU; on other backends it changes nothing.

Beside it only `cpu/blas.py` is used outside, which finds and names the libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import mlx.nn as nn
import numpy as np

from redrafter_mlx.cpu.fast_functions import (
    CosSins,
    Rope,
    SharingRope,
    only_rotates,
    with_fast_functions,
)
from redrafter_mlx.cpu.threads import THREADS
from redrafter_mlx.runtime.device import backend

_P = ParamSpec("_P")
_R = TypeVar("_R")


def prepare_for(rows: int) -> None:
    """Use the threads that suit products of `rows` query rows."""
    if backend() == "cpu":
        THREADS.prepare_for(rows)


@contextmanager
def threads_by_rows() -> Iterator[None]:
    """Context for calls of `prepare_for`; all cores are used before and after it."""
    if backend() == "cpu":
        with THREADS.by_rows():
            yield
    else:
        yield


def fast_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a module's copy, with faster attention and SwiGLU."""
    return with_fast_functions(kind) if backend() == "cpu" else kind


class SharedRotations:
    """Lets the rotary embeddings of one network share cosines and sines in its calls."""

    def __init__(self) -> None:
        self._cos_sins = CosSins() if backend() == "cpu" else None

    def rope(self, rope: nn.Module, rotate: Rope) -> Rope:
        """Return `rotate`, which applies `rope`, with shared cosines and sines."""
        if self._cos_sins is None or not only_rotates(rope):
            return rotate
        return SharingRope(rope, rotate, self._cos_sins)

    def sharing(self, call: Callable[_P, _R]) -> Callable[_P, _R]:
        """Return a call of the network, in which all embeddings are given the same positions."""
        return call if self._cos_sins is None else self._cos_sins.sharing(call)


def check_allocation(nbytes: int) -> None:
    """Raise MemoryError if the process may not take `nbytes`, such as under `ulimit -v`.

    MLX, which would take them, ends the process instead of raising an error.
    """
    if backend() == "cpu":
        np.empty(nbytes, np.uint8)  # takes addresses, but no memory while nothing is written
