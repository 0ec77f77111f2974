"""Errors in the formats of OpenAI and Anthropic, and the one that a request is answered in."""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from redrafter_mlx.server.answers.sse import Json
from redrafter_mlx.server.api_error import ApiError, as_api_error

_MESSAGES = re.compile(r"(/v1)?/messages(/.*)?")

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


def openai_error(error: ApiError) -> Json:
    """Return an error in OpenAI's format, for a response or the last event of a stream."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {
        "error": {
            "message": error.message, "type": kind, "param": error.param, "code": error.code,
        }
    }  # fmt: skip


def anthropic_error(error: ApiError) -> Json:
    """Return an error in Anthropic's format, for a response or the last event of a stream.

    A prompt that is too long has the words by which clients know that they must shorten it.
    """
    otherwise = "invalid_request_error" if error.status < 500 else "api_error"
    kind, message = _TYPES.get(error.status, otherwise), error.message
    if (length := error.length) is not None:
        message = f"prompt is too long: {length.tokens} tokens > {length.limit} maximum"
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_response(scope: Scope, error: ApiError) -> Response:
    """Return the response for an error: Anthropic's for its paths and clients, else OpenAI's."""
    of_anthropic = _MESSAGES.fullmatch(scope["path"]) or "anthropic-version" in Headers(scope=scope)
    body = anthropic_error(error) if of_anthropic else openai_error(error)
    return JSONResponse(body, error.status, error.headers)


async def respond_with_error(request: Request, error: Exception) -> Response:
    """Starlette's exception handler."""
    return error_response(request.scope, as_api_error(error))
