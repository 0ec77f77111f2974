"""One engine's requests: from the callers to its scheduler, in the engine's thread."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from redrafter_mlx.engine.request import Answer
from redrafter_mlx.engine.scheduler import Scheduler
from redrafter_mlx.engine.thread import Cancels, EngineThread
from redrafter_mlx.errors import EngineFailedError, device_failure
from redrafter_mlx.runtime.device import ModelLock

LOG = logging.getLogger("redrafter_mlx.engine")

_IDLE_SECONDS = 1.0
"""Seconds without an answer after which the engine counts as idle: between the answers of a program
there are fewer."""


@dataclass(frozen=True)
class EngineStatus:
    """The engine's current state."""

    running: int  # answers whose prompt is being read, or that are being decoded
    waiting: int  # answers that are not admitted yet
    last_progress: float  # `time.monotonic()` of the last round; stands still if the engine hangs


class EngineCore:
    """Runs a scheduler in an engine thread.

    If the scheduler fails, its answers end with an error, and a new scheduler replaces it.
    """

    def __init__(
        self,
        make_scheduler: Callable[[], Scheduler],
        lock: ModelLock,
        thread: EngineThread,
        prepare: Callable[[], float] | None = None,
    ) -> None:
        """`lock` is the model's, which the scheduler takes for every round.

        prepare: does a part of what waits for times without answers, and takes that lock; returns
          the share that is done
        """
        self._make_scheduler, self._lock, self._thread = make_scheduler, lock, thread
        self.scheduler = make_scheduler()
        self.submitted: SimpleQueue[Answer] = SimpleQueue()  # and not in the scheduler yet
        self._closed = False
        self._progress = time.monotonic()
        self._part, self._idle = prepare, threading.Timer(0, lambda: None)
        thread.enter(lock)

    @property
    def status(self) -> EngineStatus:
        scheduler = self.scheduler
        waiting = scheduler.waiting + self.submitted.qsize()
        return EngineStatus(scheduler.running, waiting, self._progress)

    def submit(self, answers: Sequence[Answer], cancels: Cancels) -> None:
        """Queue answers; raises EngineFailedError if the engine was closed or cannot run."""
        cancels += [answer.cancel for answer in answers]
        if self._closed:
            raise EngineFailedError("the model was closed; load it again")
        self._thread.start()  # or nothing is queued
        for answer in answers:
            self.submitted.put(answer)
        self._thread.submit(self._round)

    def close(self) -> None:
        """End all answers with an error, and leave the thread. May be called again."""
        self._closed = True
        self._idle.cancel()
        self._thread.leave(self._lock, self._round)

    def _round(self) -> bool:
        """Take in new answers and work one round; False if nothing is left to do."""
        self._progress = time.monotonic()
        while not self.submitted.empty():
            self.scheduler.add(self.submitted.get())
        if self._closed:
            self.fail("the model was closed")
        if self.scheduler.idle:
            self._prepare_soon()
            return False
        try:
            self.scheduler.work(self._thread.alone)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold every cache of the round
            why = device_failure(error) or f"{type(error).__name__}: {error}"
            self.fail(f"the engine failed: {why}", error)
        self._progress = time.monotonic()
        if self.scheduler.idle:
            self._prepare_soon()
        return not self.scheduler.idle

    def _prepare_soon(self) -> None:
        self._idle.cancel()
        if self._part is not None and not self._closed:
            self._idle = threading.Timer(_IDLE_SECONDS, self._begin_to_prepare)
            self._idle.daemon = True
            self._idle.start()

    def _begin_to_prepare(self) -> None:
        with contextlib.suppress(EngineFailedError):  # the next request gets this error
            if not self._closed:
                self._thread.submit(self._prepare)

    def _prepare(self) -> bool:
        """Do a part of the work for idle times; False if none is left, or others need the thread.

        It begins again after the next answer.
        """
        idle = self.scheduler.idle and self.submitted.empty() and self._thread.alone
        if self._closed or not idle or self._part is None:
            return False
        try:
            done = self._part() >= 1
        except Exception as error:
            LOG.warning("drafting is not prepared: %s: %s", type(error).__name__, error)
            done = True
        if done:
            self._part = None
        return not done

    def fail(self, why: str, cause: BaseException | None = None) -> None:
        """End all answers with an error, and replace the scheduler."""
        error = EngineFailedError(" ".join(why.split()))
        error.__cause__ = cause
        failed, self.scheduler = self.scheduler, self._make_scheduler()
        failed.fail(error)
