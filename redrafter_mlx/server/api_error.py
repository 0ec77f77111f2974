"""Errors that the server answers with: a status and the wrong parameter, in no API's format."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass

from starlette.exceptions import HTTPException

from redrafter_mlx.errors import (
    BadInputError,
    BusyError,
    ContextLengthError,
    EngineFailedError,
    RedrafterError,
)

_RETRY_SECONDS = 5

LOG = logging.getLogger("redrafter_mlx.server")


@dataclass(eq=False)
class ApiError(Exception):
    """A response other than 200; each API has a format for it."""

    status: int  # HTTP status
    message: str
    _: KW_ONLY
    param: str | None = None  # the wrong parameter, such as "messages.0.content"
    code: str | None = None  # OpenAI's code for the error, if there is one
    headers: Mapping[str, str] | None = None
    length: ContextLengthError | None = None  # the prompt's, if the context is too short for it

    def __str__(self) -> str:
        return self.message


def busy(message: str, seconds: int = _RETRY_SECONDS) -> ApiError:
    """Return a 503 that asks the client to retry after `seconds`."""
    return ApiError(503, message, code="overloaded", headers={"Retry-After": str(seconds)})


@contextlib.contextmanager
def blamed_on(param: str, renamed: Callable[[str], str] = str) -> Iterator[None]:
    """Turn a BadInputError into a 400 that names the wrong parameter.

    That is the parameter at the start of its message, as in "tools.0.function: ...", else `param`.

    renamed: returns the request's name of a parameter of OpenAI's chat completions
    """
    try:
        yield
    except BadInputError as error:
        named = re.match(r"([a-z_]+(?:\.\w+)*): ", str(error))
        if named is None:
            raise _bad_input(error, str(error), param) from error
        where = renamed(named[1])
        raise _bad_input(error, f"{where}: {str(error)[named.end() :]}", where) from error


def _bad_input(error: BadInputError, message: str, param: str | None = None) -> ApiError:
    length = error if isinstance(error, ContextLengthError) else None
    code = None if length is None else "context_length_exceeded"
    return ApiError(400, message, param=param, code=code, length=length)


def as_api_error(error: Exception) -> ApiError:
    """Return the error with which the server answers an exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BadInputError):
        return _bad_input(error, str(error))
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, error.detail, headers=error.headers)
    if isinstance(error, BusyError):
        return busy(str(error))
    if isinstance(error, RedrafterError):
        failed = error.__cause__ if isinstance(error, EngineFailedError) else None
        LOG.error("%s", error, exc_info=failed)
        return ApiError(500, str(error))
    return ApiError(500, "the server failed to answer; its log says why")
