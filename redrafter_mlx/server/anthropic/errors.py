"""Errors in Anthropic's format: a type for each status."""

from __future__ import annotations

from redrafter_mlx.server.answers.sse import Json
from redrafter_mlx.server.api_error import ApiError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


def error_body(error: ApiError) -> Json:
    """Return an error as the body of a response, or as the last event of a stream.

    A prompt that is too long has the words by which clients know that they must shorten it.
    """
    otherwise = "invalid_request_error" if error.status < 500 else "api_error"
    kind, message = _TYPES.get(error.status, otherwise), error.message
    if (length := error.length) is not None:
        message = f"prompt is too long: {length.tokens} tokens > {length.limit} maximum"
    return {"type": "error", "error": {"type": kind, "message": message}}
