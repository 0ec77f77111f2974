"""Errors in OpenAI's format: an object that names the parameter."""

from __future__ import annotations

from redrafter_mlx.server.answers.sse import Json
from redrafter_mlx.server.api_error import ApiError


def error_body(error: ApiError) -> Json:
    """Return an error as the body of a response, or as the last event of a stream."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {
        "error": {
            "message": error.message, "type": kind, "param": error.param, "code": error.code,
        }
    }  # fmt: skip
