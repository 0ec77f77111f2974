"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE = 240.0
"""Seconds after which a test fails. Nothing takes that long, even on a busy machine, where the
first answer of a process compiles kernels for a minute."""


def wait_for(reached: Callable[[], bool]) -> None:
    """Wait until a condition holds; fails if it never does."""
    end = time.monotonic() + DEADLINE
    while not reached():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
