"""The operations that a lazy graph would run, without running it: speed laws without a clock."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from redrafter_mlx.bench.programs.on_paper import VIEWS, operations


def touching(size: int, function: Callable[..., object], *arrays: mx.array) -> tuple[int, int]:
    """Return how many arrays of `size` numbers a function's operations read, and write.

    The function is not run.
    """
    read = written = 0
    broadcast: set[str] = set()  # views of smaller arrays

    def count(found: dict[str, Any]) -> None:
        nonlocal read, written
        if found["type"] != "primitive":
            return
        of_size = [
            [name for name, shape, _ in found[side] if math.prod(shape) == size]
            for side in ("inputs", "outputs")
        ]
        if found["name"] in {"Broadcast", "BroadcastAxes"}:
            broadcast.update(of_size[1])
        if found["name"] not in VIEWS:
            read += len({*of_size[0]} - broadcast)
            written += len(of_size[1])

    mx.disable_compile()  # whose operations cannot be listed
    try:
        mx.export_function(count, function, *arrays)
    finally:
        mx.enable_compile()
    return read, written


def launched(arrays: list[mx.array]) -> Counter[str]:
    return Counter(name for name in operations(arrays) if name not in VIEWS)
