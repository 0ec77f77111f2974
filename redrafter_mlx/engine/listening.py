"""How callers wait for responses: in a thread, or in an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from queue import Empty, SimpleQueue

from redrafter_mlx.engine.request import Answer, Event, Tell
from redrafter_mlx.engine.scheduler import Job
from redrafter_mlx.engine.worker import Worker
from redrafter_mlx.errors import EngineFailedError
from redrafter_mlx.response import Response

MakeJob = Callable[[Tell], Job]
"""Makes a job, given the function that sends its events to the caller."""

_CHECK_SECONDS = 1.0
"""Seconds without an event after which the caller checks that the engine's thread is alive."""


def responses(
    worker: Worker, jobs: Sequence[MakeJob]
) -> Generator[tuple[int, Response], None, None]:
    """Yield the responses to all jobs, each with the job's index, as they come.

    Closing the generator ends the answers at their next step, and waits until they have ended. The
    first error ends all answers.
    """
    events: SimpleQueue[tuple[int, Event]] = SimpleQueue()
    answers: list[Answer] = []
    ended = 0

    def tell_of(i: int) -> Tell:
        return lambda event: events.put((i, event))

    try:
        for i, make in enumerate(jobs):
            job = make(tell_of(i))
            worker.submit(job)
            answers.append(job.answer)
        while ended < len(answers):
            i, event = _next(events, worker)
            if event.response is not None:
                yield i, event.response
            else:
                ended += 1
                if event.error is not None:
                    raise event.error
    finally:
        for answer in answers:
            answer.cancel()
        while ended < len(answers) and worker.alive and not worker.is_current:
            ended += _next(events, worker)[1].response is None


async def aresponses(worker: Worker, make: MakeJob) -> AsyncGenerator[Response, None]:
    """Yield the responses to one job; cancelling it ends the answer at its next step."""
    loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

    def tell(event: Event) -> None:
        loop.call_soon_threadsafe(events.put_nowait, event)

    job = make(tell)
    worker.submit(job)
    last: Event | None = None
    with _watched(worker, tell):
        try:
            while last is None:
                event = await events.get()
                if event.response is not None:
                    yield event.response
                else:
                    last = event
        finally:
            job.answer.cancel()
            while last is None:
                event = await events.get()
                last = event if event.response is None else None
    if last.error is not None:
        raise last.error


@contextlib.contextmanager
def _watched(worker: Worker, tell: Tell) -> Iterator[None]:
    """Tell an event loop's caller that the answer has ended if the engine's thread dies."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def check() -> None:
        nonlocal timer
        if worker.alive:
            timer = loop.call_later(_CHECK_SECONDS, check)
        else:
            tell(Event(None, _gone()))  # after all that the thread has told

    timer = loop.call_later(_CHECK_SECONDS, check)
    try:
        yield
    finally:
        timer.cancel()


def _next(events: SimpleQueue[tuple[int, Event]], worker: Worker) -> tuple[int, Event]:
    """Wait for the next event; raises EngineFailedError if the engine's thread has died."""
    while True:
        try:
            return events.get(timeout=_CHECK_SECONDS)
        except Empty:
            if not worker.alive and events.empty():
                raise _gone() from None


def _gone() -> EngineFailedError:
    return EngineFailedError("the engine's thread is gone; load the model again")
