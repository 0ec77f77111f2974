"""Takes the requests of one engine from a queue to its scheduler, in the thread that computes."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue

from redrafter_mlx.engine.compute_thread import ComputeThread
from redrafter_mlx.engine.request import Answer
from redrafter_mlx.engine.scheduler import Scheduler
from redrafter_mlx.errors import EngineFailedError, device_failure
from redrafter_mlx.runtime.process import MLX_PROCESS, ModelLock, called_by_itself


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
    """Runs a scheduler in a thread that computes.

    If the scheduler fails, its answers end with an error, and a new scheduler replaces it.
    """

    def __init__(
        self, make_scheduler: Callable[[], Scheduler], lock: ModelLock, thread: ComputeThread
    ) -> None:
        """`lock` is the model's, which the scheduler takes for every round."""
        self._make_scheduler, self._lock, self.thread = make_scheduler, lock, thread
        self._inbox: SimpleQueue[Answer] = SimpleQueue()
        self._scheduler = make_scheduler()
        self._closing = threading.Lock()
        self._closed = False
        self._progress = time.monotonic()
        thread.enter()

    @property
    def status(self) -> EngineStatus:
        scheduler = self._scheduler
        waiting = scheduler.waiting + self._inbox.qsize()
        return EngineStatus(scheduler.running, waiting, self._progress)

    @property
    def alive(self) -> bool:
        """Whether the thread is running, so that more events may come."""
        return self.thread.alive

    @property
    def waits_for_caller(self) -> bool:
        """Whether it cannot go on before the caller does: it is the caller, or needs its lock."""
        return self.thread.is_current or self._lock.held_here

    def submit(self, answer: Answer) -> None:
        """Queue the answer to a request.

        Raises ForkedProcessError in a fork of the engine's process, and BadInputError in the
        engine's own thread, or the one that holds the model's lock, which would wait for itself.
        """
        MLX_PROCESS.check()
        if self.waits_for_caller:
            raise called_by_itself()
        with self._closing:
            if self._closed:
                raise EngineFailedError("the model was closed; load it again")
            self.thread.start()
            self._inbox.put(answer)
            self.thread.post(self._work)

    def close(self) -> None:
        """End all answers with an error, and leave the thread. May be called again."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        if self.thread.alive:
            with suppress(EngineFailedError):  # it ended meanwhile
                self.thread.post(self._work)
        self.thread.leave(join=not self.waits_for_caller)

    def _work(self) -> bool:
        """Take in new requests and work one round; False if nothing is left to do."""
        self._progress = time.monotonic()
        while not self._inbox.empty():
            self._scheduler.add(self._inbox.get())
        if self._closed:
            self._fail("the model was closed")
        if self._scheduler.idle:
            return False
        try:
            self._scheduler.work()
        except BaseException as error:
            why = device_failure(error) or f"{type(error).__name__}: {error}"
            self._fail(f"the engine failed: {why}", error)
        self._progress = time.monotonic()
        return not self._scheduler.idle

    def _fail(self, why: str, cause: BaseException | None = None) -> None:
        if cause is not None:  # its frames hold every cache of the round that failed
            traceback.clear_frames(cause.__traceback__)
        error = EngineFailedError(" ".join(why.split()))
        error.__cause__ = cause
        failed, self._scheduler = self._scheduler, self._make_scheduler()
        failed.fail(error)
