"""Run coroutines together and end them together; none is left running."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from starlette.types import Receive

from redrafter_mlx.errors import BusyError

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client has closed its connection."""


async def race(*work: Coroutine[Any, Any, T]) -> T:
    """Return the result of the first to end; the others are cancelled and awaited."""
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task.done()).result()
    finally:
        await _end(tasks)


async def together(*work: Coroutine[Any, Any, None]) -> None:
    """Run all to their end; the first that fails cancels the others, and its error is raised."""
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def client_gone(receive: Receive) -> Any:
    """Wait until the client has closed its connection, then raise ClientGoneError.

    The request's body must have been read.
    """
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGoneError


class Ending:
    """Signals that the server is shutting down and all answers must end."""

    def __init__(self) -> None:
        self._begun = asyncio.Event()

    def begin(self) -> None:
        self._begun.set()

    async def reached(self) -> Any:
        """Wait for the signal, then raise BusyError."""
        await self._begun.wait()
        raise BusyError("the server is ending; ask again later")


async def in_daemon_thread(
    work: Callable[[], T], room: AbstractContextManager[object] | None = None
) -> T:
    """Run `work` in a thread that does not keep the process alive.

    room: entered first, for as long as that takes; work that nobody waits for by then is not done
    """
    result: Future[T] = Future()

    def run() -> None:
        with room or nullcontext():
            if not result.set_running_or_notify_cancel():  # the waiting task was cancelled
                return
            try:
                result.set_result(work())
            except BaseException as error:
                result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(result)


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
