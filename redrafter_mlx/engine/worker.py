"""The one thread that computes with a model; it takes requests from a queue."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

import mlx.core as mx

from redrafter_mlx.engine.request import Answer
from redrafter_mlx.engine.scheduler import Scheduler
from redrafter_mlx.errors import EngineFailedError, device_failure
from redrafter_mlx.runtime.blas import BLAS
from redrafter_mlx.runtime.process import MLX_PROCESS, ModelLock, called_by_itself

_JOIN_SECONDS = 5.0
"""Seconds that closing waits for the thread, which may be in the middle of a step."""


@dataclass(frozen=True)
class EngineStatus:
    """The engine's current state.

    running:       number of answers whose prompt is being read, or that are being decoded
    waiting:       number of answers that are not admitted yet
    last_progress: `time.monotonic()` of the last round; does not advance if the engine hangs
    """

    running: int
    waiting: int
    last_progress: float


class Worker:
    """Runs a scheduler in a thread, which starts with the first request.

    If the scheduler fails, its answers end with an error, and a new scheduler replaces it.
    """

    def __init__(self, make_scheduler: Callable[[], Scheduler], lock: ModelLock) -> None:
        """`lock` is the model's, which the scheduler takes for every round."""
        self._make_scheduler, self._lock = make_scheduler, lock
        self._inbox: SimpleQueue[Answer | None] = SimpleQueue()  # None closes
        self._scheduler = make_scheduler()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._progress = time.monotonic()

    @property
    def status(self) -> EngineStatus:
        scheduler = self._scheduler
        waiting = scheduler.waiting + self._inbox.qsize()
        return EngineStatus(scheduler.running, waiting, self._progress)

    @property
    def alive(self) -> bool:
        """Whether the thread is running, so that more events may come."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def waits_for_caller(self) -> bool:
        """Whether it cannot go on before the caller does: it is the caller, or needs its lock."""
        return self._thread is threading.current_thread() or self._lock.held_here

    def submit(self, answer: Answer) -> None:
        """Queue the answer to a request.

        Raises ForkedProcessError in a fork of the engine's process, and BadInputError in the
        engine's own thread, or the one that holds the model's lock, which would wait for itself.
        """
        MLX_PROCESS.check()
        if self.waits_for_caller:
            raise called_by_itself()
        with self._starting:
            if self._closed:
                raise EngineFailedError("the model was closed; load it again")
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
                self._thread.start()
            self._inbox.put(answer)

    def close(self) -> None:
        """Stop the thread; all answers end with an error. May be called again."""
        with self._starting:
            self._closed = True
            self._inbox.put(None)
        if self._thread is not None and not self.waits_for_caller:
            self._thread.join(_JOIN_SECONDS)

    def _serve(self) -> None:
        """Work while there is something to do; otherwise wait for requests."""
        try:
            with BLAS.threads_by_rows():
                while self._take_in():
                    try:
                        self._scheduler.work()
                    except BaseException as error:
                        why = device_failure(error) or f"{type(error).__name__}: {error}"
                        self._fail(f"the engine failed: {why}", error)
                    self._progress = time.monotonic()
            self._fail("the model was closed")
        finally:
            mx.clear_streams()  # or the process may abort when it ends

    def _take_in(self) -> bool:
        """Hand new requests to the scheduler; False once the engine is closed."""
        while self._scheduler.idle or not self._inbox.empty():
            answer = self._inbox.get()
            self._progress = time.monotonic()
            if answer is None:
                return False
            self._scheduler.add(answer)
        return True

    def _fail(self, why: str, cause: BaseException | None = None) -> None:
        if cause is not None:  # its frames hold every cache of the round that failed
            traceback.clear_frames(cause.__traceback__)
        error = EngineFailedError(" ".join(why.split()))
        error.__cause__ = cause
        failed, self._scheduler = self._scheduler, self._make_scheduler()
        failed.fail(error)
