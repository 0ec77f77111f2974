"""An endpoint that generates: it turns a request's body into a reply, streamed or whole."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from threading import Semaphore
from typing import Generic

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from redrafter_mlx.server.admission import Gate, Turn
from redrafter_mlx.server.answering import Emitted, generate
from redrafter_mlx.server.api_error import LOG, ApiError
from redrafter_mlx.server.hosting import Hosted, ModelHost
from redrafter_mlx.server.metrics import Metrics
from redrafter_mlx.server.openai.reply import R, Reply
from redrafter_mlx.server.options import ServerOptions
from redrafter_mlx.server.sse import Emit, EventStream
from redrafter_mlx.server.tasks import (
    ClientGoneError,
    Ending,
    client_gone,
    in_daemon_thread,
    race,
)

_MEGABYTE = 2**20
_MAX_DISCARDED = 200 * _MEGABYTE

_MAX_PLANS = 4
"""Replies planned at the same time. Those of clients that have left are not planned."""


@dataclass(frozen=True, eq=False)
class GenerationEndpoint(Generic[R]):
    """An ASGI application for one path.

    schema:   schema of the request
    reply:    makes the reply to a request, from the request, the model and the time of its arrival
    planning: room for replies that are made at the same time
    """

    schema: type[R]
    reply: Callable[[R, Hosted, float], Reply[R]]
    host: ModelHost
    gate: Gate
    metrics: Metrics
    options: ServerOptions
    ending: Ending
    planning: Semaphore = field(default_factory=partial(Semaphore, _MAX_PLANS))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Cancelled only when the server is shutting down and does not wait any longer.
        with contextlib.suppress(ClientGoneError, ClientDisconnect, asyncio.CancelledError):
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = time.perf_counter()
        body = await _read_body(Request(scope, receive), self.options.max_body * _MEGABYTE)
        asked = self.schema.parse(body)
        self.host.check_name(asked.model)
        if ignored := asked.check_fields():
            LOG.info(
                "%s: ignored %.300s",
                scope["path"],
                ", ".join(ascii(name)[1:-1] for name in ignored),
            )
        with self.gate.admitted(asked.answers) as turn:
            async with self.host.held() as hosted:
                reply = await self._planned(asked, hosted, arrived, receive)
                try:
                    if asked.stream:
                        await self._stream(hosted, reply, turn)(scope, receive, send)
                        return
                    await race(self._generate(hosted, reply, turn, _drop), client_gone(receive))
                finally:
                    for record in reply.records:
                        if record.incomplete:
                            self.metrics.end(hosted.name, record)
        await JSONResponse(reply.whole())(scope, receive, send)

    async def _planned(
        self, asked: R, hosted: Hosted, arrived: float, receive: Receive
    ) -> Reply[R]:
        """Plan the reply, which for a long prompt takes seconds, as long as anyone waits for it."""
        work = in_daemon_thread(lambda: self.reply(asked, hosted, arrived), self.planning)
        return await race(work, client_gone(receive), self.ending.reached())

    def _stream(self, hosted: Hosted, reply: Reply[R], turn: Turn) -> EventStream:
        async def produce(emit: Emit) -> None:
            for chunk in reply.opening():
                await emit(chunk)
            await self._generate(hosted, reply, turn, emit)
            for chunk in reply.closing():
                await emit(chunk)

        return EventStream(produce, reply.silence())

    async def _generate(self, hosted: Hosted, reply: Reply[R], turn: Turn, emit: Emit) -> None:
        """Generate the answers, add them to the reply and the metrics, and emit its chunks."""

        async def deliver(emitted: Emitted) -> None:
            chunks, last = reply.add(emitted), emitted.last
            self.metrics.step(hosted.name, emitted)
            if last.finish_reason is not None:
                self.metrics.end(hosted.name, reply.records[emitted.answer])
                LOG.info(
                    "%s: %d + %d tokens, %.1f tok/s, %.2f tokens/step, %s",
                    hosted.name,
                    last.prompt_tokens,
                    last.generation_tokens,
                    last.generation_tps,
                    last.tokens_per_step,
                    last.finish_reason,
                )
            for chunk in chunks:
                await emit(chunk)

        async def reading(answer: int, read: int, total: int) -> None:
            await emit(reply.reading(answer, read, total))

        on_prefill = reading if reply.shows_own_fields else None
        work = generate(hosted.model, reply.requests, reply.alternatives, turn, deliver, on_prefill)
        await race(work, self.ending.reached())


async def _drop(_: object) -> None:
    """Emit nothing: a whole reply is sent at its end."""


async def _read_body(request: Request, most: int) -> bytes:
    """Read the body; raises ApiError if it has more bytes than `most`.

    Excess bytes are still read, up to a limit, and discarded: a client that is still sending when
    its connection is closed may never see the answer.
    """
    body, size = bytearray(), 0
    async for piece in request.stream():
        size += len(piece)
        if size <= most:
            body += piece
        elif size > _MAX_DISCARDED + most:
            break
    if size > most:
        raise ApiError(413, f"the body has more than {most // _MEGABYTE} MB (--max-body)")
    return bytes(body)
