"""Limits on the answers that are generated at once, and on those that wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager

from redrafter_mlx.server.api_error import ApiError, busy

Turn = Callable[[], AbstractAsyncContextManager[None]]
"""Waits until the next answer of an admitted request may run, and counts it as running."""


class Gate:
    """Lets up to `max_running` answers run, in order of arrival, and `max_waiting` more wait.

    running: number of answers that are being generated
    waiting: number of answers that were admitted and have not started
    """

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self._most = max_running + max_waiting
        self._free = asyncio.Semaphore(max_running)
        self.running = self.waiting = 0

    @contextlib.contextmanager
    def admitted(self, answers: int) -> Iterator[Turn]:
        """Admit a request's answers; raises ApiError if there is no room for them."""
        if answers > self._most:
            raise ApiError(
                400, f"{answers} answers were asked for; this server takes {self._most}", param="n"
            )
        if self.running + self.waiting + answers > self._most:
            raise busy(f"the queue is full ({self.waiting} answers wait); ask later")
        left = answers

        @contextlib.asynccontextmanager
        async def turn() -> AsyncIterator[None]:
            nonlocal left
            async with self._free:
                left -= 1
                self.waiting -= 1
                self.running += 1
                try:
                    yield
                finally:
                    self.running -= 1

        self.waiting += answers
        try:
            yield turn
        finally:
            self.waiting -= left
