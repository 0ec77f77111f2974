"""How callers wait for responses: in a thread, or in an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from queue import SimpleQueue

from redrafter_mlx.engine.compute_thread import CHECK_SECONDS, quiet_at_exit, thread_is_gone
from redrafter_mlx.engine.request import Answer, Event, Request, Tell
from redrafter_mlx.engine.worker import Worker
from redrafter_mlx.response import Response
from redrafter_mlx.runtime.process import called_by_itself

Make = Callable[[Request, Tell], Answer]
"""Makes the answer to a request; the engine's own method, so that it stays alive meanwhile."""


def responses(
    worker: Worker, make: Make, requests: Sequence[Request]
) -> Generator[tuple[int, Response], None, None]:
    """Yield the responses to all requests, each with the request's index, as they come.

    Closing the generator ends the answers at their next step, and waits until they have ended,
    unless that would never be: the collector may close it in the thread that computes. The first
    error ends all answers.
    """
    events: SimpleQueue[tuple[int, Event]] = SimpleQueue()
    answers: list[Answer] = []
    submitted = ended = 0

    def tell_of(i: int) -> Tell:
        return lambda event: events.put((i, event))

    try:
        with quiet_at_exit():
            for i, request in enumerate(requests):
                answers.append(make(request, tell_of(i)))
                worker.submit(answers[-1])  # an interrupt in it leaves one that is cancelled below
                submitted += 1
            while ended < submitted:
                if worker.waits_for_caller:
                    raise called_by_itself()
                i, event = worker.thread.next_from(events)
                if isinstance(event, Response):
                    yield i, event
                else:
                    ended += 1
                    if event is not None:
                        raise event
    finally:
        for answer in answers:
            answer.cancel()
        while ended < submitted and worker.alive and not worker.waits_for_caller:
            ended += not isinstance(worker.thread.next_from(events)[1], Response)


async def aresponses(
    worker: Worker, make: Make, request: Request
) -> AsyncGenerator[Response, None]:
    """Yield the responses to one request; cancelling it ends the answer at its next step."""
    loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

    def tell(event: Event) -> None:
        loop.call_soon_threadsafe(events.put_nowait, event)

    answer = make(request, tell)
    with quiet_at_exit():
        worker.submit(answer)
        with _watched(worker, tell):
            try:
                while isinstance(event := await events.get(), Response):
                    yield event
            except BaseException:  # cancelled or closed
                answer.cancel()
                while isinstance(await events.get(), Response):
                    pass
                raise
        if event is not None:
            raise event


@contextlib.contextmanager
def _watched(worker: Worker, tell: Tell) -> Iterator[None]:
    """Tell an event loop's caller that the answer has ended if the engine's thread dies."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def check() -> None:
        nonlocal timer
        if worker.alive:
            timer = loop.call_later(CHECK_SECONDS, check)
        else:
            tell(thread_is_gone())  # after all that the thread has told

    timer = loop.call_later(CHECK_SECONDS, check)
    try:
        yield
    finally:
        timer.cancel()
