"""The server as an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from importlib.resources import files

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from redrafter_mlx.errors import RedrafterError
from redrafter_mlx.server.admission import Gate
from redrafter_mlx.server.api_error import LOG, ApiError, respond_with_error
from redrafter_mlx.server.hosting import ModelHost
from redrafter_mlx.server.metrics import Metrics
from redrafter_mlx.server.openai.chat_completions import ChatReply
from redrafter_mlx.server.openai.completions import CompletionReply
from redrafter_mlx.server.openai.endpoint import GenerationEndpoint
from redrafter_mlx.server.openai.schemas import ChatRequest, CompletionRequest
from redrafter_mlx.server.options import ServerOptions
from redrafter_mlx.server.security import Guard, content_security_policy
from redrafter_mlx.server.tasks import Ending

_STALL_SECONDS = 60.0
"""Seconds without any progress of waiting work until /health fails."""


def create_app(
    host: ModelHost,
    options: ServerOptions,
    *,
    failed: Callable[[Exception], None] | None = None,
    ending: Ending | None = None,
) -> Starlette:
    """Build the application that serves a model.

    It answers 503 while the model is loaded, and calls `failed` if its first loading fails.
    Once `ending` begins, answers end with an error.
    """
    gate = Gate(options.max_concurrency, options.max_queue)
    metrics = Metrics(lambda: gate.running, lambda: gate.waiting)
    shared = (host, gate, metrics, options, ending or Ending())
    information = Information(host)
    chat = GenerationEndpoint(ChatRequest, ChatReply, *shared)
    completions = GenerationEndpoint(CompletionRequest, CompletionReply, *shared)

    async def load() -> None:
        try:
            await host.start()
        except Exception as error:
            LOG.error("%s cannot be loaded: %s", host.name, error)
            if failed is not None:
                failed(error)
        else:
            LOG.info("%s is ready", host.name)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        loading = asyncio.create_task(load())
        try:
            yield
        finally:
            loading.cancel()
            host.close()

    middleware = [Middleware(_plain_target), Middleware(Guard, options=options)]
    if options.cors_origin:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=options.cors_origin,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            allow_private_network=True,
        )
        middleware.insert(0, cors)
    routes = [
        Route("/", information.page),
        Route("/health", information.health),
        Route("/metrics", metrics.response),
    ]
    for prefix in ("/v1", ""):  # some clients leave out the prefix
        routes += [
            Route(f"{prefix}/models", information.models),
            Route(f"{prefix}/models/{{name:path}}", information.model),
            Route(f"{prefix}/chat/completions", chat, methods=["POST"]),
            Route(f"{prefix}/completions", completions, methods=["POST"]),
            Route(f"{prefix}/responses{{rest:path}}", _no_responses, methods=["GET", "POST"]),
        ]
    return Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers=dict.fromkeys(_ANSWERED, respond_with_error),
        lifespan=lifespan,
    )


async def _no_responses(_: Request) -> Response:
    raise ApiError(
        404,
        "this server has chat completions and completions only; switch the Responses API off in "
        "the client (docs/server.md names the settings)",
    )


def _plain_target(app: ASGIApp) -> ASGIApp:
    """Read every form of a request's target as a path.

    - `//` is `/`: clients join a base URL that ends with one and a path.
    - `http://host/path`, as clients of a proxy send it, is the path, and its host overrides the
      Host header (RFC 9112, 3.2.2).
    """

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path, headers = scope["path"], scope["headers"]
            if absolute := re.match("https?://([^/]*)", path, re.IGNORECASE):
                others = [(name, value) for name, value in headers if name != b"host"]
                headers = [(b"host", absolute[1].encode("latin-1", "replace")), *others]
                path = path[absolute.end() :] or "/"
            scope = {**scope, "path": _with_single_slashes(path), "headers": headers}
        await app(scope, receive, send)

    return call


def _with_single_slashes(path: str) -> str:
    return re.sub("/+", "/", path)


_ANSWERED = (ApiError, HTTPException, RedrafterError, Exception)


@dataclass(frozen=True)
class Information:
    """The endpoints that generate nothing."""

    host: ModelHost

    async def page(self, _: Request) -> Response:
        """Return the page at /, which works without a model."""
        page = files("redrafter_mlx.server").joinpath("static/page.html").read_text("utf-8")
        headers = {
            "Content-Security-Policy": content_security_policy(page),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }
        return HTMLResponse(page, headers=headers)

    async def health(self, _: Request) -> Response:
        """Return 200 if requests are answered, 503 while the model first loads or work stalls."""
        if self.host.starting:
            return JSONResponse({"status": "loading model"}, 503, {"Retry-After": "2"})
        if self.host.stalled(_STALL_SECONDS):
            return JSONResponse({"status": "work waits and nothing moves"}, 503)
        return JSONResponse({"status": "ok"})

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self.host.entry]})

    async def model(self, request: Request) -> Response:
        name, own = request.path_params["name"], self.host.name
        # A folder's name begins with a slash, which the path of a request has already.
        self.host.check_name(own if name == _with_single_slashes(own).lstrip("/") else name)
        return JSONResponse(self.host.entry)
