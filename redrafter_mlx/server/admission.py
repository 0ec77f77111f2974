"""Limits on the answers that are generated at once, and on those that wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from redrafter_mlx.server.api_error import ApiError, busy


class Gate:
    """Lets up to `max_running` answers run, in order of arrival, and `max_waiting` more wait.

    running: number of answers that are being generated
    waiting: number of answers that were admitted and have not started
    """

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self._most = max_running + max_waiting
        self._free = asyncio.Semaphore(max_running)
        self._admitted = 0
        self.running = 0

    @property
    def waiting(self) -> int:
        return self._admitted - self.running

    @contextlib.contextmanager
    def admitted(self, answers: int) -> Iterator[Places]:
        """Admit a request's answers; raises ApiError if there is no room for them."""
        if answers > self._most:
            raise ApiError(
                400, f"{answers} answers were asked for; this server takes {self._most}", param="n"
            )
        if self._admitted + answers > self._most:
            raise busy(f"the queue is full ({self.waiting} answers wait); ask later")
        self._admitted += answers
        places = Places(self, answers)
        try:
            yield places
        finally:
            self._admitted -= places.left

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until an admitted answer may run; its place is free again when it has ended."""
        async with self._free:
            self.running += 1
            try:
                yield
            finally:
                self.running -= 1
                self._admitted -= 1


class Places:
    """The places that one request's answers have at a gate.

    left: number of answers that have not ended
    """

    def __init__(self, gate: Gate, answers: int) -> None:
        self._gate, self.left = gate, answers

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until the next of the answers may run, and count it as running."""
        async with self._gate.turn():
            self.left -= 1  # from now on the gate counts it
            yield
