"""Answer an exception in the format of the API that the request is for."""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from redrafter_mlx.server.anthropic import errors as anthropic
from redrafter_mlx.server.api_error import ApiError, as_api_error
from redrafter_mlx.server.openai import errors as openai

_MESSAGES = re.compile(r"(/v1)?/messages(/.*)?")


def error_response(scope: Scope, error: ApiError) -> Response:
    """Return the response for an error: Anthropic's for its paths and clients, else OpenAI's."""
    of_anthropic = _MESSAGES.fullmatch(scope["path"]) or "anthropic-version" in Headers(scope=scope)
    body = anthropic.error_body(error) if of_anthropic else openai.error_body(error)
    return JSONResponse(body, error.status, error.headers)


async def respond_with_error(request: Request, error: Exception) -> Response:
    """Starlette's exception handler."""
    return error_response(request.scope, as_api_error(error))
