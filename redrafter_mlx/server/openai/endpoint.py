"""An endpoint that generates: it turns a request's body into a reply, streamed or whole."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Generic, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from redrafter_mlx.server.admission import Gate, Places
from redrafter_mlx.server.answering import Emitted, Prefill, generate
from redrafter_mlx.server.api_error import LOG, ApiError
from redrafter_mlx.server.hosting import Hosted, Hosts
from redrafter_mlx.server.metrics import Metrics
from redrafter_mlx.server.openai.reply import Reply
from redrafter_mlx.server.openai.schemas import GenerationRequest
from redrafter_mlx.server.options import ServerOptions
from redrafter_mlx.server.sse import Emit, EventStream
from redrafter_mlx.server.tasks import ClientGoneError, Ending, client_gone, race

R = TypeVar("R", bound=GenerationRequest)

_MEGABYTE = 2**20
_MAX_DISCARDED = 200 * _MEGABYTE


class GenerationEndpoint(Generic[R]):
    """An ASGI application for one path.

    schema: schema of the request
    reply:  makes the reply to a request, from the request and the model
    """

    def __init__(
        self,
        schema: type[R],
        reply: Callable[[R, Hosted], Reply],
        hosts: Hosts,
        gate: Gate,
        metrics: Metrics,
        options: ServerOptions,
        ending: Ending,
    ) -> None:
        self._schema, self._reply = schema, reply
        self._hosts, self._gate, self._metrics = hosts, gate, metrics
        self._options, self._ending = options, ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Cancelled only when the server is shutting down and does not wait any longer.
        with contextlib.suppress(ClientGoneError, ClientDisconnect, asyncio.CancelledError):
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read_body(Request(scope, receive), self._options.max_body * _MEGABYTE)
        asked = self._schema.parse(body)
        host = self._hosts.find(asked.model)
        if ignored := asked.check_fields():
            LOG.info("%s: ignored %s", scope["path"], ", ".join(ignored))
        with self._gate.admitted(asked.answers) as places:
            async with host.held() as hosted:
                reply = await asyncio.to_thread(self._reply, asked, hosted)
                try:
                    if asked.stream:
                        await self._stream(hosted, reply, places)(scope, receive, send)
                        return
                    work = self._whole(hosted, reply, places)
                    await race(work, client_gone(receive), self._ending.reached())
                finally:
                    for record in reply.records:
                        if record.incomplete:
                            self._metrics.end(hosted.name, record)
        await JSONResponse(reply.whole())(scope, receive, send)

    def _stream(self, hosted: Hosted, reply: Reply, places: Places) -> EventStream:
        async def produce(emit: Emit) -> None:
            async def deliver(emitted: Emitted) -> None:
                for chunk in self._count(reply, hosted.name, emitted):
                    await emit(chunk)

            async def reading(chunk: Prefill) -> None:
                await emit(reply.reading(chunk))

            for chunk in reply.opening():
                await emit(chunk)
            on_prefill = reading if reply.shows_own_fields else None
            work = generate(hosted.model, reply.wanted, places, deliver, on_prefill)
            await race(work, self._ending.reached())
            for chunk in reply.closing():
                await emit(chunk)

        return EventStream(produce, reply.silence(), self._options.heartbeat)

    async def _whole(self, hosted: Hosted, reply: Reply, places: Places) -> None:
        async def deliver(emitted: Emitted) -> None:
            self._count(reply, hosted.name, emitted)

        await generate(hosted.model, reply.wanted, places, deliver)

    def _count(self, reply: Reply, name: str, emitted: Emitted) -> list[dict[str, object]]:
        """Add what was emitted to the reply and the metrics; return the reply's chunks."""
        chunks = reply.add(emitted)
        self._metrics.step(name, emitted)
        last = emitted.last
        if last.finish_reason is not None:
            self._metrics.end(name, reply.records[emitted.answer])
            LOG.info(
                "%s: %d + %d tokens, %.1f tok/s, %.2f tokens/step, %s",
                name,
                last.prompt_tokens,
                last.generation_tokens,
                last.generation_tps,
                last.tokens_per_step,
                last.finish_reason,
            )
        return chunks


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
