"""An endpoint that generates: from a request's body to its reply, streamed or whole."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Generic, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.server.admission import Gate
from redrafter_mlx.server.answering import Emitted, generate
from redrafter_mlx.server.api_error import LOG, ApiError
from redrafter_mlx.server.hosting import Hosts
from redrafter_mlx.server.metrics import Metrics
from redrafter_mlx.server.options import ServerOptions
from redrafter_mlx.server.reply import Reply
from redrafter_mlx.server.schemas import GenerationRequest
from redrafter_mlx.server.sse import Emit, EventStream
from redrafter_mlx.server.tasks import ClientGoneError, client_gone, race

R = TypeVar("R", bound=GenerationRequest)

_MEGABYTE = 2**20


class GenerationEndpoint(Generic[R]):
    """An ASGI application for one path.

    schema: of the request
    reply:  makes the reply to a request with a model, under the model's name
    """

    def __init__(
        self,
        schema: type[R],
        reply: Callable[[R, Redrafter, str], Reply],
        hosts: Hosts,
        gate: Gate,
        metrics: Metrics,
        options: ServerOptions,
    ) -> None:
        self._schema, self._reply = schema, reply
        self._hosts, self._gate, self._metrics = hosts, gate, metrics
        self._options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGoneError, ClientDisconnect):
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read_body(Request(scope, receive), self._options.max_body * _MEGABYTE)
        asked = self._schema.parse(body)
        host = self._hosts.find(asked.model)
        if ignored := asked.check_fields():
            LOG.info("%s: ignored %s", scope["path"], ", ".join(ignored))
        with self._gate.admitted(asked.answers):
            async with host.held() as model:
                reply = await asyncio.to_thread(self._reply, asked, model, host.name)
                if asked.stream:
                    await self._stream(model, reply, host.name)(scope, receive, send)
                    return
                await race(self._whole(model, reply, host.name), client_gone(receive))
        await JSONResponse(reply.whole())(scope, receive, send)

    def _stream(self, model: Redrafter, reply: Reply, name: str) -> EventStream:
        async def produce(emit: Emit) -> None:
            async def deliver(emitted: Emitted) -> None:
                for chunk in self._count(reply, name, emitted):
                    await emit(chunk)

            for chunk in reply.opening():
                await emit(chunk)
            await generate(model, reply.wanted, self._gate, deliver)
            for chunk in reply.closing():
                await emit(chunk)

        return EventStream(produce, reply.silence(), self._options.heartbeat)

    async def _whole(self, model: Redrafter, reply: Reply, name: str) -> None:
        async def deliver(emitted: Emitted) -> None:
            self._count(reply, name, emitted)

        await generate(model, reply.wanted, self._gate, deliver)

    def _count(self, reply: Reply, name: str, emitted: Emitted) -> list[dict[str, object]]:
        """Add what was emitted to the reply and to the metrics; the chunks it makes."""
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
    """The body; raises ApiError if it has more bytes than `most`, or the client leaves."""
    too_large = ApiError(413, f"the body has more than {most // _MEGABYTE} MB (--max-body)")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > most:
        raise too_large
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most:
            raise too_large
    return bytes(body)
