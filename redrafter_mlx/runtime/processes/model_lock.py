"""Guards against computing where a thread would wait forever: in a fork, and for itself.

A fork does not copy MLX's threads; a forked process that computes would wait for them.
"""

from __future__ import annotations

import os
import threading

from redrafter_mlx.errors import BadInputError, ForkedProcessError


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

    A waiting thread gets the lock before the thread that has just released it. The thread that
    holds it is refused: it would wait for itself.
    """

    def __init__(self) -> None:
        self._lock, self._next = threading.Lock(), threading.Lock()
        self._holder: int | None = None

    @property
    def held_here(self) -> bool:
        """Whether the caller's thread holds it."""
        return self._holder == threading.get_ident()

    def check(self) -> None:
        """Raise ForkedProcessError in a fork, and BadInputError in the thread that holds it."""
        MLX_PROCESS.check()  # first: after a fork, the thread that holds the lock may be gone
        if self.held_here:
            raise called_by_itself()

    def __enter__(self) -> None:
        self.check()
        with self._next:
            self._lock.acquire()
        self._holder = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._holder = None
        self._lock.release()


def called_by_itself() -> BadInputError:
    """Return the error of a call that would wait for its own thread."""
    return BadInputError(
        "a callback or constraint of an answer called the model that computes the answer, in the "
        "engine's own thread; call it from another thread, after the callback"
    )
