"""Read requests, and plan what is asked for in a thread, as long as a client waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from threading import Semaphore
from typing import TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope

from redrafter_mlx.server.api_error import LOG, ApiError
from redrafter_mlx.server.hosting import Hosted, ModelHost
from redrafter_mlx.server.models import Models
from redrafter_mlx.server.options import ServerOptions
from redrafter_mlx.server.requests.generation_request import GenerationRequest
from redrafter_mlx.server.tasks import Ending, client_gone, in_daemon_thread, race

T = TypeVar("T")
Asked = TypeVar("Asked", bound=GenerationRequest)

_MEGABYTE = 2**20
_MAX_DISCARDED = 200 * _MEGABYTE

_MAX_PLANS = 4
"""Requests of one path planned at the same time. Those of clients that have left are not."""


@dataclass(frozen=True, eq=False)
class Reception:
    """Takes the requests to one path.

    planning: room for requests that are planned at the same time
    """

    models: Models
    options: ServerOptions
    ending: Ending
    planning: Semaphore = field(default_factory=partial(Semaphore, _MAX_PLANS))

    async def read(
        self, schema: type[Asked], scope: Scope, receive: Receive
    ) -> tuple[Asked, ModelHost]:
        """Read a request, log the names of ignored fields, and find its model; raises ApiError."""
        body = await _read_body(Request(scope, receive), self.options.max_body * _MEGABYTE)
        asked = schema.parse(body)
        host = await self.models.find(asked.model)
        if ignored := asked.check_fields():
            names = ", ".join(ascii(name)[1:-1] for name in ignored)
            LOG.info("%s: ignored %.300s", scope["path"], names)
        return asked, host

    @contextlib.asynccontextmanager
    async def held(self, host: ModelHost, receive: Receive) -> AsyncIterator[Hosted]:
        """Yield a model, and keep it in memory meanwhile; waits for it as long as the client."""
        async with contextlib.AsyncExitStack() as stack:
            waits = stack.enter_async_context(host.held())
            yield await race(waits, client_gone(receive), self.ending.reached())

    async def plan(self, work: Callable[[], T], receive: Receive) -> T:
        """Return the result of `work`, which for a long prompt takes seconds."""
        planned = in_daemon_thread(work, self.planning)
        return await race(planned, client_gone(receive), self.ending.reached())


async def _read_body(request: Request, max_bytes: int) -> bytes:
    """Read the body; raises ApiError if it has more bytes than `max_bytes`.

    Excess bytes are read, up to a limit, and discarded: a client that is still sending when its
    connection is closed may never see the answer.
    """
    body, size = bytearray(), 0
    async for piece in request.stream():
        size += len(piece)
        if size <= max_bytes:
            body += piece
        elif size > _MAX_DISCARDED + max_bytes:
            break
    if size > max_bytes:
        raise ApiError(413, f"the body has more than {max_bytes // _MEGABYTE} MB (--max-body)")
    return bytes(body)
