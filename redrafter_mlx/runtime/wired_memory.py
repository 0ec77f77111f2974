"""Wired memory: what stays resident on Metal while answers are generated."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import mlx.core as mx


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
