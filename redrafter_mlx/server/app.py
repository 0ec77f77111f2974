"""The server as an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from importlib.resources import files

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from redrafter_mlx.errors import RedrafterError
from redrafter_mlx.server.admission import Gate
from redrafter_mlx.server.api_error import LOG, ApiError, respond_with_error
from redrafter_mlx.server.hosting import Hosts, ModelHost
from redrafter_mlx.server.metrics import Metrics
from redrafter_mlx.server.openai.chat_completions import ChatReply
from redrafter_mlx.server.openai.completions import CompletionReply
from redrafter_mlx.server.openai.endpoint import GenerationEndpoint
from redrafter_mlx.server.openai.schemas import ChatRequest, CompletionRequest
from redrafter_mlx.server.options import ServerOptions
from redrafter_mlx.server.security import Guard, content_security_policy
from redrafter_mlx.server.tasks import Ending


def create_app(
    models: Sequence[ModelHost],
    options: ServerOptions,
    *,
    failed: Callable[[Exception], None] | None = None,
    ending: Ending | None = None,
) -> Starlette:
    """Build the application that serves `models`; the first is for requests that name none.

    It answers 503 while models are loaded, and calls `failed` if a model's first loading fails.
    Once `ending` begins, answers end with an error.
    """
    hosts = Hosts(models)
    gate = Gate(options.max_concurrency, options.max_queue)
    metrics = Metrics(lambda: gate.running, lambda: gate.waiting)
    shared = (hosts, gate, metrics, options, ending or Ending())
    information = Information(hosts, metrics, options.stall)
    chat = GenerationEndpoint(ChatRequest, ChatReply, *shared)
    completions = GenerationEndpoint(CompletionRequest, CompletionReply, *shared)

    async def load() -> None:
        for host in hosts.all:
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
            for host in hosts.all:
                host.close()

    middleware = [Middleware(Guard, options=options)]
    if options.cors_origin:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=options.cors_origin,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
        middleware.insert(0, cors)
    return Starlette(
        routes=[
            Route("/", information.page),
            Route("/health", information.health),
            Route("/metrics", information.metrics),
            Route("/v1/models", information.models),
            Route("/v1/models/{name:path}", information.model),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
        ],
        middleware=middleware,
        exception_handlers=dict.fromkeys(_ANSWERED, respond_with_error),
        lifespan=lifespan,
    )


_ANSWERED = (ApiError, HTTPException, RedrafterError, Exception)


class Information:
    """The endpoints that generate nothing."""

    def __init__(self, hosts: Hosts, metrics: Metrics, stall_seconds: float) -> None:
        self._hosts, self._metrics, self._stall_seconds = hosts, metrics, stall_seconds

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
        """Return 200 if requests are answered, 503 while a model is first loaded or work stalls."""
        if any(host.starting for host in self._hosts.all):
            return JSONResponse({"status": "loading model"}, 503, {"Retry-After": "2"})
        if any(host.stalled(self._stall_seconds) for host in self._hosts.all):
            return JSONResponse({"status": "work waits and nothing moves"}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(self, _: Request) -> Response:
        """Return Prometheus metrics."""
        return self._metrics.response()

    async def models(self, _: Request) -> Response:
        """List all models."""
        return JSONResponse({"object": "list", "data": [host.entry for host in self._hosts.all]})

    async def model(self, request: Request) -> Response:
        """Describe one model."""
        return JSONResponse(self._hosts.find(request.path_params["name"]).entry)
