"""The process in which MLX computes.

MLX's threads do not come along when a process forks, and a child that computes then waits for them
for ever.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType

from redrafter_mlx.errors import ForkedProcessError


class MLXProcess:
    """Which process computed with MLX first: this one, or one that it was forked from."""

    def __init__(self) -> None:
        self._number: int | None = None

    def check(self) -> None:
        """Call before MLX computes; raises ForkedProcessError in a fork of a process that did."""
        if self._number is None:
            self._number = os.getpid()
        elif self._number != os.getpid():
            raise ForkedProcessError(
                "MLX was used before this process was forked, and cannot be used after; start "
                'processes with multiprocessing.get_context("spawn"), and load the model in them'
            )


MLX_PROCESS = MLXProcess()


class ModelLock:
    """Lets one thread at a time compute with a model, and none in a forked process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        MLX_PROCESS.check()  # first: in a fork nobody may be left to release the lock
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._lock.release()
