"""Calls whose arguments are JSON, with the name in the JSON or in a head before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from redrafter_mlx.weights.text.calls.form import (
    Call,
    Calls,
    Form,
    NoCallError,
    Setting,
    UnfinishedError,
    arguments_of,
)
from redrafter_mlx.weights.text.calls.literal import closed, read_literal

JSON_LEADS = ('{"', "{'", "[{")

_NAMES, _OTHERS = ("name", "function", "tool"), ("id", "type", "index")
"""Keys of a call that hold its name, and that say more of it."""


@dataclass(frozen=True, kw_only=True)
class JSONForm(Form):
    """`{"name": ..., "arguments": {...}}`, a list of it, or the arguments after a head."""

    certain: bool = True
    head: str | None = None  # regular expression, groups `name` and perhaps `id`; arguments follow
    tail: str = ""  # regular expression of what may follow the arguments

    def read(self, text: str, setting: Setting) -> Calls:
        calls: list[Call] = []
        at = end = 0
        while (at := setting.skip(text, at)) < len(text):
            try:
                found, at = self._read_one(text, at, setting)
            except NoCallError:
                break
            except UnfinishedError:
                raise UnfinishedError((calls, end) if calls else None) from None
            calls += found
            end = at
        if not calls:
            raise NoCallError
        return calls, len(text) if at == len(text) else end

    def completions(self, text: str) -> Sequence[str]:
        return closed(text)

    def _read_one(self, text: str, at: int, setting: Setting) -> tuple[list[Call], int]:
        head = setting.pattern(self.head).match(text, at) if self.head else None
        if head is None:
            value, at = read_literal(text, at)
            return calls_in(value, setting), at
        value, at = read_literal(text, head.end())
        call = Call(head["name"], arguments_of(value), head.groupdict().get("id"))
        tail = setting.pattern(self.tail).match(text, at)
        return [call], tail.end() if tail else at


def calls_in(value: object, setting: Setting) -> list[Call]:
    """Return the calls in a JSON value, in any of the shapes that models write.

    Raises NoCallError if any part is not a call of a known tool.
    """
    values = value if isinstance(value, list) else [value]
    if not values:
        raise NoCallError
    return [_call(one, setting) for one in values]


def _call(value: object, setting: Setting) -> Call:
    if not isinstance(value, Mapping):
        raise NoCallError
    inner = next((value[k] for k in _NAMES if k in value), None)
    given = {**value, **inner} if isinstance(inner, Mapping) else value
    named = [given.get(key) for key in _NAMES]
    name = next((one for one in named if isinstance(one, str)), "")
    if name not in setting.schemas:
        raise NoCallError
    known = next((key for key in ("arguments", "parameters") if key in given), None)
    if known is None:  # the arguments are beside the name
        properties = setting.schemas[name].get("properties")
        listed = properties if isinstance(properties, Mapping) else {}
        arguments: object = {
            k: v for k, v in given.items() if k not in _NAMES and (k in listed or k not in _OTHERS)
        }
    else:
        arguments = given[known]
    wrote_id = given.get("id")
    return Call(name, arguments_of(arguments), wrote_id if isinstance(wrote_id, str) else None)
