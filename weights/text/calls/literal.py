"""Literals of JSON and of Python within a longer text: where one ends, and what it lacks."""

from __future__ import annotations

import json
import re

from redrafter_mlx.weights.text.calls.form import NoCallError, UnfinishedError
from redrafter_mlx.weights.text.calls.values import JSON, python_literal

_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"""' r"|'''(?:\\.|[^\\])*?'''"
    r'|"(?:\\.|[^"\\])*"' r"|'(?:\\.|[^'\\])*'"
    r"""|[\[\](){},"']|[^\[\](){},"']+""",
    re.DOTALL,
)  # fmt: skip

_CLOSING = {"[": "]", "(": ")", "{": "}"}


def read_literal(text: str, at: int) -> tuple[object, int]:
    """Return the object or list that begins here, and where it ends: JSON, or else Python.

    Raises:
      NoCallError: there is none
      UnfinishedError: the text ends within one of its strings
    """
    try:
        return JSON.raw_decode(text, at)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string"):
            raise UnfinishedError from None
        if text[error.pos : error.pos + 1] not in ("'", "T", "F", "N", "("):
            raise NoCallError from None
    except RecursionError:
        raise NoCallError from None
    end = extent(text, at, "")
    try:
        return python_literal(text[at:end]), end
    except ValueError:
        raise NoCallError from None


def extent(text: str, at: int, stops: str) -> int:
    """Return where a literal ends: at one of the stops outside of brackets and strings.

    Without stops it is one pair of brackets.

    Raises:
      NoCallError: it has no end
      UnfinishedError: the text ends within one of its strings
    """
    depth = 0
    for match in _TOKEN.finditer(text, at):
        token = match[0]
        if token in ('"', "'"):
            raise UnfinishedError
        if depth == 0 and token in stops:
            return match.start()
        depth += (token in _CLOSING) - (token in _CLOSING.values())
        if depth == 0 and not stops and token in _CLOSING.values():
            return match.end()
    raise NoCallError


def closed(text: str) -> list[str]:
    """Return a text with the brackets that it lacks; nothing if it ends within a value."""
    open_brackets: list[str] = []
    for match in _TOKEN.finditer(text):
        if match[0] in ('"', "'"):
            return []
        if match[0] in _CLOSING:
            open_brackets.append(_CLOSING[match[0]])
        elif open_brackets and match[0] == open_brackets[-1]:
            open_brackets.pop()
    if text.rstrip()[-1:] not in _CLOSING.values():
        return []
    return [text + "".join(reversed(open_brackets))]
