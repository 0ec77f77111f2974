"""Calls written as in a programming language, with strings in quotes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from redrafter_mlx.weights.text.calls.form import (
    Call,
    Calls,
    Form,
    NoCallError,
    Setting,
    UnfinishedError,
    end_of,
)
from redrafter_mlx.weights.text.calls.json_calls import JSON_LEADS, JSONForm
from redrafter_mlx.weights.text.calls.literal import closed, extent
from redrafter_mlx.weights.text.calls.values import Schema, literal, parameter

_JSON = JSONForm(leads=JSON_LEADS)
_BRACKET, _COMMA = re.compile(r"\s*\["), re.compile(r"\s*[,;]")
_LONGEST_AFTER = 2000
"""Characters of a pattern of what may follow a value; deeper containers have a shorter one."""

_KEYWORD = re.compile(r"\s*(\w+)\s*=\s*")


@dataclass(frozen=True, kw_only=True)
class PythonForm(Form):
    """`[f(a="x", b=[1, true]), g()]`"""

    certain: bool = True

    def read(self, text: str, setting: Setting) -> Calls:
        if text.lstrip()[:1] == "{" or "".join(text[:80].split())[:2] == "[{":
            return _JSON.read(text, setting)
        head = setting.pattern(r"\s*NAME\s*\(")
        calls: list[Call] = []
        at = begin = end_of(_BRACKET, text, 0)
        while (called := head.match(text, at)) is not None:
            arguments, at = _python_arguments(text, called.end(), setting.schemas[called["name"]])
            calls.append(Call(called["name"], arguments))
            at = end_of(_COMMA, text, at)
        if not calls or (begin and not text[at:].lstrip().startswith("]")):
            raise NoCallError
        return calls, text.index("]", at) + 1 if begin else at

    def completions(self, text: str) -> Sequence[str]:
        return closed(text)


def _python_arguments(text: str, at: int, root: Schema) -> tuple[dict[str, object], int]:
    """Return the arguments from here on, and the position after the bracket that ends them."""
    properties = root.get("properties")
    order = list(properties) if isinstance(properties, Mapping) else []
    arguments: dict[str, object] = {}
    while True:
        end = extent(text, at, ",)")
        if text[at:end].strip():
            keyword = _KEYWORD.match(text, at)
            if keyword is None and len(arguments) >= len(order):
                raise NoCallError
            key = keyword[1] if keyword else order[len(arguments)]
            if key in arguments:
                raise NoCallError
            raw = text[keyword.end() if keyword else at : end].strip()
            arguments[key] = literal(raw, parameter(root, key), root)
        at = end + 1
        if text[end] == ")":
            return arguments, at


@dataclass(frozen=True, kw_only=True)
class GemmaForm(Form):
    """`call:f{a:"x",b:[1,{c:true}]}`, with a mark of its own as the quote of strings."""

    quote: str

    def read(self, text: str, setting: Setting) -> Calls:
        head = setting.pattern(r"call:\s*NAME\s*\{")
        calls: list[Call] = []
        at = end = 0
        while (at := setting.skip(text, at)) < len(text):
            called = head.match(text, at)
            if called is None:
                if calls:
                    return calls, end
                raise NoCallError
            reader = _GemmaReader(self.quote, text, setting.schemas[called["name"]])
            try:
                arguments, at = reader.arguments(called.end())
            except RecursionError:
                raise NoCallError from None
            except UnfinishedError:
                raise UnfinishedError((calls, end) if calls else None) from None
            calls.append(Call(called["name"], arguments))
            end = at
        if not calls:
            raise NoCallError
        return calls, len(text)

    def completions(self, text: str) -> Sequence[str]:
        return [text + "}", text + self.quote + "}"]


class _GemmaReader:
    """Reads the arguments of one call.

    A string may hold the quote. So it ends at the first one that the rest of all containers around
    it can follow; `after`, a regular expression of that, grows with their depth.
    """

    def __init__(self, quote: str, text: str, root: Schema) -> None:
        self._quote, self._text, self._root = quote, text, root
        q = re.escape(quote)
        key = rf'\s*(?:{q}(?P<quoted>.*?){q}|"(?P<json>[^"]*)"|(?P<bare>[^\s:{{}}\[\],<>]+))\s*:\s*'
        self._key = re.compile(key, re.DOTALL)
        self._any_key = re.sub(r"\?P<\w+>", "?:", key)
        self._any_item = rf"\s*(?:{q}|[\[{{\d-]|true|false|null)"

    def arguments(self, at: int) -> tuple[dict[str, object], int]:
        """Return the arguments after the bracket that opens them, and where they end."""
        return self._object(at, r"\s*(?:$|call:)", lambda key: parameter(self._root, key))

    def _object(
        self, at: int, after: str, schema_of: Callable[[str], object]
    ) -> tuple[dict[str, object], int]:
        found: dict[str, object] = {}
        after = rf"\s*(?:,{self._any_key}|\}}{after if len(after) < _LONGEST_AFTER else ''})"
        while not (ended := self._separator(at))[1]:
            key = self._key.match(self._text, ended.end())
            if key is None:
                raise NoCallError
            name = next(one for one in key.groups() if one is not None)
            if name in found:
                raise NoCallError
            found[name], at = self._value(key.end(), after, schema_of(name))
        return found, ended.end()

    def _array(self, at: int, after: str) -> tuple[list[object], int]:
        found: list[object] = []
        after = rf"\s*(?:,{self._any_item}|\]{after if len(after) < _LONGEST_AFTER else ''})"
        while not (ended := self._separator(at))[1]:
            value, at = self._value(ended.end(), after, {})
            found.append(value)
        return found, ended.end()

    def _separator(self, at: int) -> re.Match[str]:
        """Match what comes before the next part of a container, or its end as the group."""
        match = re.compile(r"\s*,?\s*([\]}]?)").match(self._text, at)
        assert match is not None
        if match.end() == len(self._text) and not match[1]:
            raise UnfinishedError
        return match

    def _value(self, at: int, after: str, schema: object) -> tuple[object, int]:
        follows = re.compile(after, re.DOTALL)
        if self._text.startswith(self._quote, at):
            begin = end = at + len(self._quote)
            while (end := self._text.find(self._quote, end)) >= 0:
                if follows.match(self._text, end + len(self._quote)):
                    return self._text[begin:end], end + len(self._quote)
                end += 1
            raise UnfinishedError
        if self._text[at : at + 1] == "{":
            return self._object(at + 1, after, lambda _: {})
        if self._text[at : at + 1] == "[":
            return self._array(at + 1, after)
        quoted = re.compile(r'"(?:\\.|[^"\\])*"', re.DOTALL).match(self._text, at)
        if quoted and follows.match(self._text, quoted.end()):
            return literal(quoted[0], {}, {}), quoted.end()
        ends = re.compile(rf"[\]}}]|,{self._any_key}|,", re.DOTALL)
        for end in (match.start() for match in ends.finditer(self._text, at)):
            if follows.match(self._text, end):
                return literal(self._text[at:end].strip(), schema, self._root), end
        raise UnfinishedError
