"""Errors in OpenAI's format: a status, and an object that names the parameter."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from redrafter_mlx.errors import BadInputError, BusyError, ContextLengthError, RedrafterError

_RETRY_SECONDS = 5

LOG = logging.getLogger("redrafter_mlx.server")


@dataclass(eq=False)
class ApiError(Exception):
    """A response other than 200.

    status: HTTP status
    param:  the wrong parameter, such as "messages.0.content"
    code:   OpenAI's code for the error, if there is one
    """

    status: int
    message: str
    _: KW_ONLY
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] | None = None

    def __str__(self) -> str:
        return self.message

    @property
    def body(self) -> dict[str, object]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        return JSONResponse(self.body, self.status, self.headers)


def busy(message: str, seconds: int = _RETRY_SECONDS) -> ApiError:
    """Return a 503 that asks the client to retry after `seconds`."""
    return ApiError(503, message, code="overloaded", headers={"Retry-After": str(seconds)})


@contextlib.contextmanager
def blamed_on(param: str) -> Iterator[None]:
    """Turn a BadInputError into a 400 that names the wrong parameter.

    That is the parameter at the start of its message, as in "tools.0.function: ...", else `param`.
    """
    try:
        yield
    except BadInputError as error:
        named = re.match(r"([a-z_]+(?:\.\w+)*): ", str(error))
        raise _bad_input(error, named[1] if named else param) from error


def _bad_input(error: BadInputError, param: str | None = None) -> ApiError:
    code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
    return ApiError(400, str(error), param=param, code=code)


def as_api_error(error: Exception) -> ApiError:
    """Return the error with which the server answers an exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BadInputError):
        return _bad_input(error)
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, error.detail, headers=error.headers)
    if isinstance(error, BusyError):
        return busy(str(error))
    if isinstance(error, RedrafterError):
        LOG.error("%s", error)
        return ApiError(500, str(error))
    return ApiError(500, "the server failed to answer; its log says why")


async def respond_with_error(_: Request, error: Exception) -> Response:
    """Starlette's exception handler."""
    return as_api_error(error).response()
