"""The thread that computes, for one engine or several, and for whatever runs beside them."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from queue import Empty, SimpleQueue
from typing import TypeAlias, TypeVar

import mlx.core as mx

from redrafter_mlx.errors import EngineFailedError
from redrafter_mlx.runtime.blas import BLAS
from redrafter_mlx.runtime.process import MLX_PROCESS, called_by_itself

_T = TypeVar("_T")

Round: TypeAlias = "Callable[[], bool]"
"""Does a part of some work; returns whether any is left."""

_JOIN_SECONDS = 5.0
"""Seconds that leaving waits for the thread, which may be in the middle of a step."""

CHECK_SECONDS = 1.0
"""Seconds without a result after which the caller checks that the thread is alive."""


class ComputeThread:
    """Runs all work in one thread, round by round, in turn; it starts with the first round.

    Work that multiplies beside an engine belongs here: a BLAS gives every thread that multiplies
    workers of its own, and GNU's OpenMP lets them sleep between products as soon as there are more
    than cores. Waking them takes longer than multiplying a few rows: a step of SmolLM2 with two to
    eight nodes would take a quarter longer.
    """

    def __init__(self) -> None:
        self._inbox: SimpleQueue[Round | None] = SimpleQueue()  # None ends the thread
        self._starting = threading.RLock()  # the collector may close an engine while it is held
        self._thread: threading.Thread | None = None
        self._users = 0

    @property
    def alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in it."""
        return self._thread is threading.current_thread()

    def enter(self) -> None:
        """Count one more user; the thread ends when the last one leaves.

        Waits for the end of the thread if it is ending, so that the next one can start.
        """
        with self._starting:
            if self._users == 0 and self._thread is not None and not self.is_current:
                self._thread.join()
                self._thread = None
            self._users += 1

    def leave(self, join: bool) -> None:
        """End the thread, after what was posted, if this was the last user.

        join: wait for its end
        """
        with self._starting:
            self._users -= 1
            if self._users:
                return
            if self._thread is not None:
                self._inbox.put(None)
        if self._thread is not None and join:
            self._thread.join(_JOIN_SECONDS)

    def start(self) -> None:
        """Start the thread if it was not started; raises EngineFailedError if none can run."""
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._serve, name="engine", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # as many as the system allows
                    raise EngineFailedError(f"the engine: {error}") from error
                self._thread = thread
            elif not self._thread.is_alive():
                raise thread_is_gone()

    def post(self, work: Round) -> None:
        """Call `work` again and again until it returns False; posted twice, it is called once."""
        with self._starting:
            self.start()
            self._inbox.put(work)

    def run(self, task: Callable[[], _T], interrupted: threading.Event | None = None) -> _T:
        """Run a task and return its result; an interrupted caller waits for its end.

        interrupted: is set if the caller is interrupted, so that the task may end early

        Raises the task's error, and BadInputError in the thread itself.
        """

        def once() -> Generator[_T, None, None]:
            yield task()

        with quiet_at_exit(), closing(self.iterate(once(), interrupted)) as results:
            return next(results)

    def iterate(
        self, items: Generator[_T, None, None], closed: threading.Event | None = None
    ) -> Generator[_T, None, None]:
        """Yield what a generator yields that runs in the thread; closing this one closes it.

        closed: is set when this one is closed
        """
        found: SimpleQueue[Future[_T] | None] = SimpleQueue()
        closed, over = closed or threading.Event(), threading.Event()

        def work() -> bool:
            item: Future[_T] = Future()
            try:
                if closed.is_set():
                    items.close()  # so that it has no next item
                item.set_result(next(items))
            except StopIteration:
                found.put(None)
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)  # they may hold arrays
                item.set_exception(error)
                found.put(item)
            else:
                found.put(item)
                return True
            over.set()
            return False

        MLX_PROCESS.check()
        if self.is_current:
            raise called_by_itself()
        self.post(work)
        try:
            while (item := self.next_from(found)) is not None:
                yield item.result()
        finally:
            closed.set()
            # The collector may close this in the thread itself, whose next round ends `items`.
            while self.alive and not self.is_current and not over.wait(CHECK_SECONDS):
                pass

    def next_from(self, found: SimpleQueue[_T]) -> _T:
        """Wait for what the thread puts into a queue.

        Raises EngineFailedError if it has died, and BadInputError in the thread itself.
        """
        if self.is_current:
            raise called_by_itself()
        while True:
            try:
                return found.get(timeout=CHECK_SECONDS)
            except Empty:
                if not self.alive and found.empty():
                    raise thread_is_gone() from None

    def _serve(self) -> None:
        """Take rounds of all work in turn; wait while there is none."""
        rounds: dict[Round, None] = {}  # a set in the order in which they came
        ending = False
        try:
            with BLAS.threads_by_rows():
                while rounds or not ending:
                    while not self._inbox.empty() or not (rounds or ending):
                        work = self._inbox.get()
                        if work is None:
                            ending = True
                        else:
                            rounds[work] = None
                    work = None
                    rounds = {work: None for work in rounds if work()}
        finally:
            mx.clear_streams()  # or the process may abort when it ends


@contextmanager
def quiet_at_exit() -> Iterator[None]:
    """End a daemon thread that still waits for an engine when the interpreter exits.

    Engines are closed then, after all other threads have ended. Threading reports every error that
    ends a thread but SystemExit.
    """
    try:
        yield
    except EngineFailedError:
        exits = not threading.main_thread().is_alive()
        if exits and threading.current_thread().daemon:
            raise SystemExit from None
        raise


def thread_is_gone() -> EngineFailedError:
    return EngineFailedError("the engine's thread is gone; load the model again")
