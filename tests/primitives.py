"""The operations that a lazy graph would run, without running it: speed laws without a clock."""

from __future__ import annotations

import io
from collections.abc import Sequence

import mlx.core as mx


def operations(arrays: Sequence[mx.array]) -> list[str]:
    """Return the names of the primitives that compute the arrays."""
    dot = io.StringIO()
    mx.export_to_dot(dot, *arrays)
    labels = [line.split('label ="')[1] for line in dot.getvalue().splitlines() if "label" in line]
    return [label.split('"')[0] for label in labels]
