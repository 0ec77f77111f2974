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
from redrafter_mlx.server.answers.reply import R, Reply
from redrafter_mlx.server.anthropic.reply import MessageReply, count_tokens
from redrafter_mlx.server.anthropic.schema import CountRequest, MessagesRequest
from redrafter_mlx.server.api_error import ApiError
from redrafter_mlx.server.endpoint import GenerationEndpoint, PlanEndpoint
from redrafter_mlx.server.error_response import respond_with_error
from redrafter_mlx.server.hosting import Hosted
from redrafter_mlx.server.metrics import Metrics
from redrafter_mlx.server.models import Models
from redrafter_mlx.server.openai.chat_completions import ChatReply
from redrafter_mlx.server.openai.completions import CompletionReply
from redrafter_mlx.server.openai.schemas import ChatRequest, CompletionRequest
from redrafter_mlx.server.options import ServerOptions
from redrafter_mlx.server.requests.reception import Reception
from redrafter_mlx.server.responses.reply import ResponsesReply
from redrafter_mlx.server.responses.schema import ResponsesRequest
from redrafter_mlx.server.security import Guard, content_security_policy
from redrafter_mlx.server.tasks import Ending

_STALL_SECONDS = 60.0  # seconds without any progress of waiting work until /health fails


def create_app(
    models: Models,
    options: ServerOptions,
    *,
    failed: Callable[[Exception], None] | None = None,
    ending: Ending | None = None,
) -> Starlette:
    """Build the application that serves models.

    It answers 503 while they are loaded at the start, and calls `failed` if one cannot be loaded.
    Once `ending` begins, answers end with an error.
    """
    gate = Gate(options.max_concurrency, options.max_queue)
    metrics = Metrics(lambda: gate.running, lambda: gate.waiting)
    information = Information(models)
    end = ending or Ending()

    def generation(schema: type[R], reply: Callable[[R, Hosted, float], Reply[R]]) -> ASGIApp:
        return GenerationEndpoint(schema, reply, Reception(models, options, end), gate, metrics)

    endpoints: dict[str, ASGIApp] = {
        "chat/completions": generation(ChatRequest, ChatReply),
        "completions": generation(CompletionRequest, CompletionReply),
        "responses": generation(ResponsesRequest, ResponsesReply),
        "messages": generation(MessagesRequest, MessageReply),
        "messages/count_tokens": PlanEndpoint(
            CountRequest, count_tokens, Reception(models, options, end)
        ),
    }

    async def load() -> None:
        try:
            await models.start()
        except Exception as error:  # the log has it
            if failed is not None:
                failed(error)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        loading = asyncio.create_task(load())
        try:
            yield
        finally:
            loading.cancel()
            models.close()

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
            Route(
                f"{prefix}/responses/{{rest:path}}", _not_stored, methods=["GET", "POST", "DELETE"]
            ),
            *(
                Route(f"{prefix}/{path}", endpoint, methods=["POST"])
                for path, endpoint in endpoints.items()
            ),
        ]
    return Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers=dict.fromkeys(_ANSWERED, respond_with_error),
        lifespan=lifespan,
    )


_STORE_METHODS = ["GET", "POST", "DELETE"]


async def _not_stored(_: Request) -> Response:
    raise ApiError(
        404,
        "this server stores no responses: it has only POST /v1/responses, with the whole "
        "conversation; closing the connection cancels one",
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

    served: Models

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
        """Return 200, or 503 until the first model has been loaded, and while work stalls."""
        if self.served.default.starting:
            return JSONResponse({"status": "loading model"}, 503, {"Retry-After": "2"})
        if self.served.default.failed:
            return JSONResponse({"status": "the model could not be loaded"}, 503)
        if self.served.stalled(_STALL_SECONDS):
            return JSONResponse({"status": "work waits and nothing moves"}, 503)
        return JSONResponse({"status": "ok"})

    async def models(self, _: Request) -> Response:
        """Return all models that requests may name, the default one first."""
        hosts = await self.served.all()
        pages = {"has_more": False, "first_id": hosts[0].name, "last_id": hosts[-1].name}
        return JSONResponse({"object": "list", "data": [host.entry for host in hosts], **pages})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        for host in await self.served.all():
            # A folder's name begins with a slash, which the path of a request has already.
            if name == _with_single_slashes(host.name).lstrip("/"):
                return JSONResponse(host.entry)
        return JSONResponse((await self.served.find(name)).entry)
