"""Endpoints: they turn a request's body into a reply, streamed or whole."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from redrafter_mlx.server.admission import Gate, Turn
from redrafter_mlx.server.answers.answering import Emitted, generate
from redrafter_mlx.server.answers.reply import R, Reply
from redrafter_mlx.server.answers.sse import Emit, EventStream, Json
from redrafter_mlx.server.api_error import LOG
from redrafter_mlx.server.hosting import Hosted
from redrafter_mlx.server.metrics import Metrics
from redrafter_mlx.server.requests.reception import Reception
from redrafter_mlx.server.tasks import ClientGoneError, client_gone, race


@dataclass(frozen=True, eq=False)
class PlanEndpoint(Generic[R]):
    """An ASGI application for one path that generates nothing; `result` makes its answer."""

    schema: type[R]
    result: Callable[[R, Hosted], Json]
    reception: Reception

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGoneError, ClientDisconnect, asyncio.CancelledError):
            asked, host = await self.reception.read(self.schema, scope, receive)
            async with self.reception.held(host, receive) as hosted:
                result = await self.reception.plan(lambda: self.result(asked, hosted), receive)
            await JSONResponse(result)(scope, receive, send)


@dataclass(frozen=True, eq=False)
class GenerationEndpoint(Generic[R]):
    """An ASGI application for one path; `reply` takes a request, its model and its arrival."""

    schema: type[R]
    reply: Callable[[R, Hosted, float], Reply[R]]
    reception: Reception
    gate: Gate
    metrics: Metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Cancelled only when the server is shutting down and does not wait any longer.
        with contextlib.suppress(ClientGoneError, ClientDisconnect, asyncio.CancelledError):
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = time.perf_counter()
        asked, host = await self.reception.read(self.schema, scope, receive)
        with self.gate.admitted(asked.answers) as turn:
            async with self.reception.held(host, receive) as hosted:
                reply = await self.reception.plan(
                    lambda: self.reply(asked, hosted, arrived), receive
                )
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

    def _stream(self, hosted: Hosted, reply: Reply[R], turn: Turn) -> EventStream:
        async def produce(emit: Emit) -> None:
            for event in reply.opening():
                await emit(event)
            await self._generate(hosted, reply, turn, emit)
            for event in reply.closing():
                await emit(event)

        return EventStream(produce, reply.framing, reply.silence, reply.failed)

    async def _generate(self, hosted: Hosted, reply: Reply[R], turn: Turn, emit: Emit) -> None:
        """Generate the answers, add them to the reply and the metrics, and emit its events."""

        async def deliver(emitted: Emitted) -> None:
            events, last = reply.add(emitted), emitted.last
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
            for event in events:
                await emit(event)

        async def reading(answer: int, read: int, total: int) -> None:
            await emit(reply.reading(answer, read, total))

        on_prefill = reading if reply.reports_prefill else None
        work = generate(
            hosted.model,
            reply.requests,
            reply.alternatives,
            turn,
            deliver,
            on_prefill,
            hosted.more_room,
        )
        await race(work, self.reception.ending.reached())


async def _drop(_: object) -> None:
    """Emit nothing: a whole reply is sent at its end."""
