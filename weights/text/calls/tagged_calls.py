"""Calls whose parameters are raw text between tags, as in XML but without its escapes.

A value may hold any text, the form's own tags too. So it ends at the first closing tag after which
the call goes on as the form requires: with another parameter, or to its end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from redrafter_mlx.weights.text.calls.form import (
    Call,
    Calls,
    Form,
    NoCallError,
    Setting,
    ToolParser,
    UnfinishedError,
    arguments_of,
    end_of,
    without_partial,
)
from redrafter_mlx.weights.text.calls.json_calls import JSON_LEADS, JSONForm, calls_in
from redrafter_mlx.weights.text.calls.literal import read_literal
from redrafter_mlx.weights.text.calls.values import Schema, kinds, parameter, typed, write

_WORD = re.compile(r"\w+")
_SPACE = re.compile(r"\s*")
_CDATA = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*", re.DOTALL)
_JSON = JSONForm(leads=JSON_LEADS)


@dataclass(frozen=True, kw_only=True)
class TaggedForm(Form):
    """`<head><parameter>value</parameter>...</call>`, or JSON between the same marks."""

    head: str  # regular expression of a call's beginning, with the group `name`
    # regular expression of a parameter's beginning, with the group `key` and, if the form has it,
    # `type`, the JSON type that the model names
    opening: str
    closing: str  # end of a parameter
    ending: str = ""  # end of a call, empty if only the mark after the call ends it
    padding: str = ""  # text that the form puts on either side of a value
    # opening and closing tag of all arguments as one JSON object
    whole: tuple[str, str] | None = None
    # mlx-lm's parser, if it knows ways to write the arguments without tags
    plain: ToolParser | None = None

    @property
    def closes(self) -> bool:
        return bool(self.ending)

    def read(self, text: str, setting: Setting) -> Calls:
        if text.lstrip()[:1] in ("{", "["):
            return _JSON.read(text, setting)
        try:
            return self._read(text, setting)
        except UnfinishedError:
            if self.plain is None or "<" in text:
                raise
        return plain_calls(self.plain, text, setting)

    def _read(self, text: str, setting: Setting) -> Calls:
        reader = _Reader(self, setting, text)
        calls: list[Call] = []
        at = end = 0
        while (at := setting.skip(text, at)) < len(text):
            try:
                call, at = reader.call(at)
            except UnfinishedError:
                raise UnfinishedError((calls, end) if calls else None) from None
            calls.append(call)
            end = at
        if not calls:
            raise NoCallError
        return calls, len(text)

    def completions(self, text: str) -> Sequence[str]:
        if text.lstrip()[:1] in ("{", "["):
            return _JSON.completions(text)
        bare = without_partial(without_partial(text, self.ending), self.closing)
        return [bare + self.ending, bare + self.closing + self.ending]


def plain_calls(parser: ToolParser, text: str, setting: Setting) -> Calls:
    """Return what mlx-lm's parser reads, if it holds all words of the text and no others."""
    tools = [{"function": {"name": n, "parameters": s}} for n, s in setting.schemas.items()]
    try:
        calls = calls_in(parser(text, tools), setting)
        read = " ".join(f"{call.name} {write(call.arguments)}" for call in calls)
    except Exception:  # mlx-lm's parsers raise errors of any type on malformed text
        raise NoCallError from None
    if sorted(_WORD.findall(read)) != sorted(_WORD.findall(text)):
        raise NoCallError
    return calls, len(text)


class _Reader:
    """Reads the calls of one text."""

    def __init__(self, form: TaggedForm, setting: Setting, text: str) -> None:
        self._form, self._setting, self._text = form, setting, text
        self._head = setting.pattern(form.head)
        self._opening = re.compile(form.opening, re.DOTALL)
        start, end = re.escape(setting.start), re.escape(setting.end)
        between = rf"(?:\s|{start}|{end})*" if form.ending else rf"\s*(?:{end})?\s*{start}\s*"
        self._next_call = re.compile(between + form.head.replace("NAME", r"[\w.-]+"), re.DOTALL)

    def call(self, at: int) -> tuple[Call, int]:
        """Return the call that begins here, and where it ends."""
        head = self._head.match(self._text, at)
        if head is None:
            raise NoCallError if at == 0 else UnfinishedError
        root = self._setting.schemas[head["name"]]
        at = self._spaces(head.end())
        if (found := self._whole(at)) is not None:
            arguments, at = found
        else:
            arguments, at = self._parameters(at, root)
        end = self._end(at)
        if end is None:
            raise UnfinishedError
        return Call(head["name"], arguments), end

    def _whole(self, at: int) -> tuple[Mapping[str, object], int] | None:
        if self._form.whole is None:
            return None
        opening, closing = self._form.whole
        begun = re.compile(opening, re.DOTALL).match(self._text, at)
        if begun is None:
            return None
        value, at = read_literal(self._text, self._spaces(begun.end()))
        at = self._spaces(at)
        if not self._text.startswith(closing, at):
            raise UnfinishedError
        return arguments_of(value), self._spaces(at + len(closing))

    def _parameters(self, at: int, root: Schema) -> tuple[dict[str, object], int]:
        arguments: dict[str, object] = {}
        while (begun := self._opening.match(self._text, at)) is not None:
            key = begun["key"].strip().replace("&quot;", '"').replace("&amp;", "&")
            raw, at = self._value(begun.end(), {*arguments, key})
            schema = parameter(root, key)
            of_type = begun.groupdict().get("type")
            if of_type and not kinds(schema, root):
                schema = {"type": of_type}
            arguments[key] = typed(raw, schema, root)
            at = self._spaces(at)
        return arguments, at

    def _value(self, start: int, given: set[str]) -> tuple[str, int]:
        """Return the raw text of a value and where its tag ends."""
        padding, closing = self._form.padding, self._form.closing
        padded = bool(padding) and self._text.startswith(padding, start)
        begin = start + len(padding) * padded
        for tag in dict.fromkeys([padding * padded + closing, closing]):
            at = self._text.find(tag, begin if tag == closing else start)
            while at >= 0:
                end = at + len(tag)
                if self._goes_on(self._spaces(end), given):
                    raw = self._text[begin : max(at, begin)]
                    cdata = _CDATA.fullmatch(raw)
                    return (cdata[1] if cdata else raw), end
                at = self._text.find(tag, at + 1)
        raise UnfinishedError

    def _goes_on(self, at: int, given: set[str]) -> bool:
        """Whether a parameter that is not given yet begins here, or the call ends."""
        begun = self._opening.match(self._text, at)
        if begun is not None:
            return begun["key"].strip() not in given
        end = self._end(at)
        return end is not None and (
            self._setting.skip(self._text, end) == len(self._text)
            or self._next_call.match(self._text, end) is not None
        )

    def _end(self, at: int) -> int | None:
        """Return where the end of a call that begins here ends; None if there is none."""
        if self._form.ending:
            ends = self._text.startswith(self._form.ending, at)
            return at + len(self._form.ending) if ends else None
        ends = self._setting.skip(self._text, at) == len(self._text)
        return at if ends or self._next_call.match(self._text, at) else None

    def _spaces(self, at: int) -> int:
        return end_of(_SPACE, self._text, at)
