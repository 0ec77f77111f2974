"""What a form of tool calls is: where a call begins, how it is read, and what it may lack."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from redrafter_mlx.weights.text.calls.values import JSON, Schema, fitted, parameter, write

_LONGEST_LEAD = 400  # characters of a text in which a call's beginning is found

ToolParser = Callable[[str, Any], Any]
"""mlx-lm's parser: from a call's text and the tools to `{"name", "arguments"}`, or a list of it."""


class NoCallError(Exception):
    """A text is no call of a known tool, whatever follows it."""


class UnfinishedError(Exception):
    """A text ends within a value of a call, so that a mark after it is part of the value.

    before: the whole calls before that one, and where the last of them ends
    """

    def __init__(self, before: Calls | None = None) -> None:
        super().__init__()
        self.before = before


@dataclass(frozen=True)
class Call:
    """A call as the model wrote it; `id` if the form has one."""

    name: str
    arguments: Mapping[str, object]
    id: str | None = None


def checked(call: Call, schema: Schema) -> Call:
    """Return a call with the types of the schema; raises NoCallError if JSON cannot hold it."""
    try:
        arguments = {k: fitted(v, parameter(schema, k), schema) for k, v in call.arguments.items()}
        write(arguments)
    except (ValueError, TypeError, RecursionError):  # a set of Python's, or nested too deeply
        raise NoCallError from None
    return replace(call, arguments=arguments)


Calls = tuple[Sequence[Call], int]
"""Calls in a text, at least one, and the position where the last of them ends."""


@dataclass(frozen=True)
class Setting:
    """The marks around a model's calls, and the schemas of the tools' arguments by name."""

    start: str
    end: str
    schemas: Mapping[str, Schema] = field(default_factory=dict)

    @cached_property
    def names(self) -> str:
        """A regular expression that matches the name of any tool."""
        longest_first = sorted(self.schemas, key=len, reverse=True)
        return "(?P<name>" + "|".join(map(re.escape, longest_first)) + r")(?![\w.-])"

    @cached_property
    def _between(self) -> re.Pattern[str]:
        marks = "".join(f"|{re.escape(mark)}" for mark in (self.start, self.end) if mark)
        return re.compile(rf"(?:\s{marks})*")

    def pattern(self, template: str) -> re.Pattern[str]:
        """Compile a regular expression in which NAME stands for the name of any tool."""
        return re.compile(template.replace("NAME", self.names), re.DOTALL)

    def skip(self, text: str, at: int) -> int:
        """Return the position of what follows white space and marks of calls."""
        return end_of(self._between, text, at)


def end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return where a match that begins here ends; `at` if there is none."""
    match = pattern.match(text, at)
    return at if match is None else match.end()


@dataclass(frozen=True, kw_only=True)
class Form(ABC):
    """How one family of models writes calls between its marks."""

    # texts with which a call begins, without white space; NAME stands for a tool's name
    leads: Sequence[str]
    # whether an end mark after a readable call ends it. Otherwise its last value may hold the mark,
    # which shows only when another one follows
    certain: bool = False
    opener: str = ""  # beginning of a call for which models often forget the start mark
    short_ids: bool = False  # whether the chat template insists on ids of nine letters and digits

    @property
    def closes(self) -> bool:
        """Whether a call has an end of its own before the end mark."""
        return True

    @abstractmethod
    def read(self, text: str, setting: Setting) -> Calls:
        """Return the calls in the text from a start mark to an end mark or the answer's end.

        Raises:
          NoCallError: the text is no call
          UnfinishedError: more text may make it one
        """

    @abstractmethod
    def completions(self, text: str) -> Sequence[str]:
        """Return what the text could be with the closing marks that it lacks, likeliest first."""

    def begins(self, text: str, setting: Setting, *, whole: bool = False) -> bool:
        """Whether the text after a start mark is the beginning of a call.

        whole: whether it must be a whole beginning, or may be the first part of one
        """
        given = "".join(text[:_LONGEST_LEAD].split())
        leads = [
            lead.replace("NAME", name)
            for lead in self.leads
            for name in (setting.schemas if "NAME" in lead else [""])
        ]
        return any(
            given.startswith(lead) or (lead.startswith(given) and not whole) for lead in leads
        )


def without_partial(text: str, mark: str, min_length: int = 2) -> str:
    """Return a text without the beginning of a mark, of so many characters at least, at its end."""
    lengths = range(len(mark) - 1, min_length - 1, -1)
    return next((text[:-n] for n in lengths if text.endswith(mark[:n])), text)


def arguments_of(value: object) -> Mapping[str, object]:
    """Return arguments that are an object, or the JSON text of one; raises NoCallError."""
    if isinstance(value, str):
        try:
            value = JSON.decode(value)
        except (ValueError, RecursionError):
            raise NoCallError from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise NoCallError
    return value
