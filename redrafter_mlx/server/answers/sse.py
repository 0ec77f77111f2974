"""Server-sent events, until the client disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from redrafter_mlx.errors import RedrafterError
from redrafter_mlx.server.api_error import LOG, ApiError, as_api_error
from redrafter_mlx.server.tasks import ClientGoneError, client_gone, race

UNREAD_SECONDS = 60
"""Seconds after which a client that reads nothing is gone: its answers hold places meanwhile."""

HEARTBEAT_SECONDS = 5.0
"""Seconds of silence until a stream gets an empty chunk."""

Json = dict[str, Any]
Emit = Callable[[Mapping[str, object]], Awaitable[None]]


@dataclass(frozen=True)
class Framing:
    """How an API writes the events of a stream."""

    named: bool  # whether each event is sent under its own `type`
    end: str | None  # data of the last event; None without one

    def frame(self, event: Mapping[str, object]) -> str:
        data = f"data: {json.dumps(event, allow_nan=False)}\n\n"
        return f"event: {event['type']}\n{data}" if self.named else data


class EventStream(Response):
    """A response whose body is the events that `produce` emits.

    If `produce` fails, the last event is its error. If the client disconnects, `produce` is
    cancelled, and ClientGoneError is raised once it has ended. `silence` returns an event without
    content, sent after some seconds without another: events reset clients' time-outs, comments do
    not.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        produce: Callable[[Emit], Awaitable[None]],
        framing: Framing,
        silence: Callable[[], Json],
        failed: Callable[[ApiError], Json],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._produce, self._framing = produce, framing
        self._silence, self._failed = silence, failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        loop = asyncio.get_running_loop()
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(head)
        sent_at = loop.time()

        async def write(text: str) -> None:
            nonlocal sent_at
            sent_at = loop.time()
            part = {"type": "http.response.body", "body": text.encode(), "more_body": True}
            try:
                async with asyncio.timeout(UNREAD_SECONDS):
                    await send(part)
            except TimeoutError:
                raise ClientGoneError from None

        async def emit(event: Mapping[str, object]) -> None:
            await write(self._framing.frame(event))

        async def beat() -> None:
            while True:
                await asyncio.sleep(sent_at + HEARTBEAT_SECONDS - loop.time())
                if loop.time() - sent_at >= HEARTBEAT_SECONDS:
                    await emit(self._silence())

        async def produce() -> None:
            try:
                await self._produce(emit)
            except ClientGoneError:
                raise
            except Exception as error:  # the status has been sent: the stream must report the error
                if not isinstance(error, (ApiError, RedrafterError)):
                    LOG.error("a stream failed", exc_info=error)
                await emit(self._failed(as_api_error(error)))
            else:
                if self._framing.end is not None:
                    await write(f"data: {self._framing.end}\n\n")

        await race(produce(), beat(), client_gone(receive))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
