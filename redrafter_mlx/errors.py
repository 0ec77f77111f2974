"""Errors that a user can cause: one line each, on what was wrong and what to do.

The command line prints that line and exits non-zero; a library caller catches `RedrafterError`.
Any other exception that escapes is a bug of this package.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_OUT_OF_MEMORY = ("allocate", "[metal::malloc]", "Insufficient Memory", "OutOfMemory")
"""Parts of the messages with which MLX's allocators and Metal report too little memory."""


class RedrafterError(Exception):
    """Base of every error that a user can cause; `str(error)` is one readable line.

    what:   what is wrong, and what to do unless `remedy` says it
    remedy: what to do, where callers show it apart; `str(error)` ends in it
    """

    def __init__(self, what: str = "", *, remedy: str | None = None) -> None:
        super().__init__(what if remedy is None else f"{what}; {remedy}")
        self.what, self.remedy = what, remedy


class BadInputError(RedrafterError, ValueError):
    """A parameter, prompt or file content that cannot be used."""


class ContextLengthError(BadInputError):
    """A prompt that leaves no room for an answer in the model's context.

    limit:  maximum number of tokens of prompt and answer together
    tokens: the prompt's number of tokens, or the smallest possible one if `exact` is false
    """

    def __init__(self, limit: int, tokens: int, *, exact: bool = True) -> None:
        number = f"{tokens}" if exact else f"at least {tokens}"
        super().__init__(
            f"this model's maximum context length is {limit} tokens, and the prompt has {number}; "
            f"shorten it or begin a new conversation"
        )
        self.limit, self.tokens, self.exact = limit, tokens, exact


class ModelNotFoundError(RedrafterError):
    """No model of that name, repository or path."""


class DownloadError(RedrafterError):
    """A file could not be downloaded; the message says what to run once the cause is gone."""


class DamagedFileError(RedrafterError):
    """A file on disk is truncated, has a wrong checksum, or lacks a tensor."""


class MismatchError(RedrafterError):
    """A drafter and a target that do not fit together."""


class ForkedProcessError(RedrafterError):
    """MLX was used before this process was forked."""


class UnsupportedModelError(RedrafterError):
    """A model whose state cannot hold a tree of drafts."""


class ServerError(RedrafterError):
    """A server could not be reached, or did not answer according to its API."""


class BusyError(RedrafterError):
    """What the device has too little memory or time for now; another time it may have enough."""


class DrafterError(RedrafterError):
    """A user's own drafter failed, or returned what cannot be used; the message names its class."""


class EngineFailedError(RedrafterError):
    """The engine failed while it answered, or was closed; after a failure a new one replaces it."""


class TooLargeError(RedrafterError):
    """A model that this machine's memory cannot hold."""


class RankError(RedrafterError):
    """A rank of a distributed run that cannot be reached."""


def meant(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return "did you mean ...?" with the known name nearest to `name`.

    If none is near, return `otherwise`, by default a list of all known names.
    """
    choices = list(known)
    near = difflib.get_close_matches(name, choices, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return otherwise or f"there are: {', '.join(choices)}"


def out_of_memory(error: BaseException) -> bool:
    """Whether the device's memory was too small; of EngineFailedError, whether its cause was."""
    if isinstance(error, EngineFailedError) and error.__cause__ is not None:
        return out_of_memory(error.__cause__)
    of_mlx = isinstance(error, RuntimeError) and any(p in str(error) for p in _OUT_OF_MEMORY)
    return of_mlx or isinstance(error, MemoryError)


def device_failure(error: BaseException) -> str | None:
    """Return one line for a failure of the device, with what to do; None for any other error.

    MLX raises RuntimeError for it; its text alone tells which one it is.
    """
    text = " ".join(str(error).split())
    if out_of_memory(error):
        return "out of memory; try --quantize 4 (bench: --dtype 4bit) or a smaller model"
    if isinstance(error, RuntimeError) and text.startswith("[METAL]"):
        return f"{text}; it may work when the machine is less busy"
    return None


@contextmanager
def device_failures_explained() -> Iterator[None]:
    """Raise BusyError, with what to do, for a failure of the device."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        why = device_failure(error)
        if why is None:
            raise
        raise BusyError(why) from error
