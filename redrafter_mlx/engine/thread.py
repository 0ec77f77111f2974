"""One thread computes, for one engine or several; callers submit work, and listen to its events."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from queue import SimpleQueue
from typing import Generic, TypeVar

import mlx.core as mx

from redrafter_mlx.cpu.door import threads_by_rows
from redrafter_mlx.engine.memory import MemoryPool
from redrafter_mlx.errors import EngineFailedError
from redrafter_mlx.response import Emit, Ended
from redrafter_mlx.runtime.device import MLX_PROCESS, ModelLock, called_by_itself

_T = TypeVar("_T")

_END_SECONDS = 5.0
"""Maximum number of seconds that closing an engine waits."""


class Listener(Generic[_T]):
    """A caller that takes the events of its tasks, which the thread sends.

    taken: number of events that it has taken
    """

    def __init__(self, put: Emit[_T]) -> None:
        self._put, self._sent, self.taken = put, 0, 0

    def __call__(self, event: _T | Ended) -> None:
        self._sent += 1
        self._put(event)

    @property
    def unread(self) -> int:
        """Number of events that it has not taken yet."""
        return self._sent - self.taken


Cancels = list[Callable[[], None]]
"""For each task what lets it end early; any thread may call them."""

Work = Callable[[], bool]
"""Does a part of some work; returns whether any is left."""


class EngineThread:
    """Does all work in one thread, round by round; it starts with the first work.

    What multiplies beside an engine belongs here: another thread would get workers of its own from
    the BLAS, and all would sleep and wake; see `cpu/blas.py`.

    pool:  what its engines share of the memory
    alone: whether there was only one work in the last round
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Work | None] = SimpleQueue()  # None ends the thread
        self.pool, self.alone = MemoryPool(), True
        self._lock = threading.RLock()  # reentrant: the collector may close an engine while held
        self._users: list[ModelLock] = []  # one for each engine
        self._listeners: set[Callable[[Ended], None]] = set()
        self._thread: threading.Thread | None = None
        self._ended = False  # set before the listeners are notified of it
        self._error: BaseException | None = None  # that ended the thread

    @property
    def alive(self) -> bool:
        """Whether the thread is running, so that more events may come; not so in a fork."""
        return self._thread is not None and self._thread.is_alive() and not self._ended

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in it."""
        return self._thread is threading.current_thread()

    @property
    def waits_for_caller(self) -> bool:
        """Whether it cannot go on before the caller does: it is the caller, or needs its lock."""
        if self._thread is threading.current_thread():
            return True
        return True in [lock.held_here for lock in self._users]

    def enter(self, lock: ModelLock) -> None:
        """Add an engine, by its model's lock; if the last one has left, a new thread can start."""
        with self._lock:
            if not self._users and self._thread is not None and not self.is_current:
                self._thread.join()
                self._thread, self._ended, self._error = None, False, None
            self._users.append(lock)

    def leave(self, lock: ModelLock, last: Work) -> None:
        """Submit an engine's last work, remove it, and wait for its end; the last ends the thread.

        May be called again.
        """
        done = threading.Event()

        def end() -> bool:
            if left := last():
                return left
            done.set()
            return False

        with self._lock:
            if lock not in self._users:
                return
            self._users.remove(lock)
            if self._thread is None or not self.alive:
                return
            self._queue.put(end)
            others = bool(self._users)
            if not others:
                self._queue.put(None)
        if not (self.waits_for_caller or lock.held_here):  # it may be in the middle of a step
            done.wait(_END_SECONDS) if others else self._thread.join(_END_SECONDS)

    def start(self) -> None:
        """Start the thread if it was not started; raises EngineFailedError if none can run."""
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._loop, name="engine", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # as many as the system allows
                    raise EngineFailedError(f"the engine: {error}") from error
                self._thread = thread
            elif not self.alive:
                raise self._gone()

    def submit(self, work: Work) -> None:
        """Call `work` once a round, in turn, until it returns False; see `start` for errors."""
        self.start()
        self._queue.put(work)

    def run(self, task: Callable[[], _T], interrupted: threading.Event | None = None) -> _T:
        """Run a task and return its result; an interrupted caller waits for its end.

        interrupted: is set if the caller is interrupted, so that the task may end early

        Raises the task's error, and those of `listen`.
        """
        with closing(self.iterate((task() for _ in range(1)), interrupted)) as results:
            return next(results)

    def iterate(
        self, items: Generator[_T, None, None], closed: threading.Event | None = None
    ) -> Generator[_T, None, None]:
        """Yield what a generator yields that runs in the thread; closing this one closes it.

        closed: is set when this one is closed
        """
        cancelled = closed or threading.Event()

        def begin(emit: Listener[_T], cancels: Cancels) -> None:
            def work() -> bool:
                try:
                    if cancelled.is_set():
                        items.close()  # so that it has no next item
                    emit(next(items))
                except BaseException as error:
                    traceback.clear_frames(error.__traceback__)  # they may hold arrays
                    emit(Ended(None if isinstance(error, StopIteration) else error))
                    return False
                return True

            cancels.append(cancelled.set)
            self.submit(work)

        return self.listen(begin)

    def listen(self, begin: Callable[[Listener[_T], Cancels], None]) -> Generator[_T, None, None]:
        """Begin tasks, and yield their events until all have ended.

        The first error ends all. Closing the generator cancels the tasks, and waits until they have
        ended, unless that would never be: the collector may close it in the thread itself.

        begin: appends how each task is cancelled, and submits the tasks, which `emit` their events

        Raises a task's error, EngineFailedError if the thread has died, ForkedProcessError in a
        fork, and BadInputError where the thread would wait for the caller.
        """
        events, cancels = SimpleQueue[_T | Ended](), Cancels()
        listener, running = Listener[_T](events.put), 0
        with self._listening(events.put):
            try:
                begin(listener, cancels)  # interrupted, it leaves tasks that are cancelled below
                running = len(cancels)
                while running:
                    event = self.next_event(events)
                    listener.taken += 1
                    if not isinstance(event, Ended):
                        yield event
                        continue
                    running -= 1
                    if event.error is not None:
                        raise event.error
            finally:
                for cancel in cancels:
                    cancel()
                while running and self.alive and not self.waits_for_caller:
                    running -= isinstance(events.get(), Ended)

    async def alisten(
        self, begin: Callable[[Listener[_T], Cancels], None]
    ) -> AsyncGenerator[_T, None]:
        """`listen` to one task in asyncio; cancelling it cancels the task."""
        loop = asyncio.get_running_loop()
        events, cancels = asyncio.Queue[_T | Ended](), Cancels()

        def emit(event: _T | Ended) -> None:
            with suppress(RuntimeError):  # the loop is closed: others' answers go on
                loop.call_soon_threadsafe(events.put_nowait, event)

        listener = Listener[_T](emit)
        with self._listening(emit):
            begin(listener, cancels)
            try:
                while not isinstance(event := await events.get(), Ended):
                    listener.taken += 1
                    yield event
            except BaseException:  # cancelled or closed
                cancels[0]()
                while not isinstance(await events.get(), Ended):
                    pass
                raise
            if event.error is not None:
                raise event.error

    def next_event(self, events: SimpleQueue[_T]) -> _T:
        """Wait for an event; raises an error where it would never come."""
        self._check_caller()
        return events.get()

    def _check_caller(self) -> None:
        MLX_PROCESS.check()
        if self.waits_for_caller:
            raise called_by_itself()

    @contextmanager
    def _listening(self, emit: Callable[[Ended], None]) -> Iterator[None]:
        """Context in which `emit` is called if the thread ends.

        It ends a daemon thread that is still there when the interpreter exits: engines are closed
        then, after all other threads have ended, and threading prints all errors but SystemExit.
        """
        self._check_caller()
        self._listeners.add(emit)
        try:
            yield
        except EngineFailedError:
            if threading.current_thread().daemon and not threading.main_thread().is_alive():
                raise SystemExit from None
            raise
        finally:
            self._listeners.discard(emit)

    def _loop(self) -> None:
        """Take rounds of all work in turn; wait while there is none."""
        rounds: dict[Work | None, None] = {}  # a set in the order of submission
        try:
            with threads_by_rows():
                while rounds != {None: None}:
                    while not (rounds and self._queue.empty()):
                        rounds[self._queue.get()] = None
                    self.alone = len(rounds) == 1
                    rounds = {work: None for work in rounds if work is None or work()}
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            self._error = error
            raise
        finally:
            self._ended = True
            for emit in list(self._listeners):
                emit(Ended(self._gone()))
            mx.clear_streams()  # or the process may abort when it ends

    def _gone(self) -> EngineFailedError:
        why = "" if self._error is None else f" ({type(self._error).__name__}: {self._error})"
        error = EngineFailedError(f"the engine's thread is gone{why}; load the model again")
        error.__cause__ = self._error
        return error
