"""Guards against using MLX in a forked process.

A fork does not copy MLX's threads; a forked process that computes would wait for them forever.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType

from redrafter_mlx.errors import ForkedProcessError


class MLXProcess:
    """Remembers which process first computed with MLX: this one, or one it was forked from."""

    def __init__(self) -> None:
        self._pid: int | None = None

    def check(self) -> None:
        """Call before MLX computes; raises ForkedProcessError if it computed before a fork."""
        if self._pid is None:
            self._pid = os.getpid()
        elif self._pid != os.getpid():
            raise ForkedProcessError(
                "MLX was used before this process was forked, and cannot be used after; start "
                'processes with multiprocessing.get_context("spawn"), and load the model in them'
            )


MLX_PROCESS = MLXProcess()


class ModelLock:
    """Lets one thread at a time compute with a model, and none in a forked process.

    A waiting thread gets the lock before the thread that has just released it.
    """

    def __init__(self) -> None:
        self._lock, self._next = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        MLX_PROCESS.check()  # first: after a fork, the thread that holds the lock may be gone
        with self._next:
            self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._lock.release()
