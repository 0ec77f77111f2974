"""The operations that a lazy graph would run, without running it: speed laws without a clock."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

VIEWS = {
    *("AsStrided", "Broadcast", "BroadcastAxes", "ExpandDims", "Flatten", "Reshape", "Slice"),
    *("Split", "Squeeze", "StopGradient", "Transpose", "Unflatten", "CustomTransforms"),
}
"""Primitives that compute nothing."""


def operations(arrays: Sequence[mx.array]) -> list[str]:
    """Return the names of the primitives that compute the arrays."""
    dot = io.StringIO()
    mx.export_to_dot(dot, *arrays)
    labels = [line.split('label ="')[1] for line in dot.getvalue().splitlines() if "label" in line]
    return [label.split('"')[0] for label in labels]


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
