"""Values of tool parameters: read as written, typed by a tool's JSON schema, written as JSON."""

from __future__ import annotations

import ast
import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import ClassVar

from redrafter_mlx.runtime.files.json_file import to_json

Schema = Mapping[str, object]

_MAX_DIGITS = 4300  # digits of an integer that Python's `json` reads, by default

_MAX_STEPS = 1000  # parts of a schema that are looked at for one parameter

_INTEGER = re.compile(r"-?\d+", re.ASCII)

_KINDS = {
    "string": ("string",), "str": ("string",), "text": ("string",), "enum": ("string",),
    "number": ("number", "integer"), "float": ("number", "integer"),
    "double": ("number", "integer"), "integer": ("integer",), "int": ("integer",),
    "long": ("integer",), "boolean": ("boolean",), "bool": ("boolean",), "null": ("null",),
    "array": ("array",), "list": ("array",), "arr": ("array",), "object": ("object",),
    "dict": ("object",),
}  # fmt: skip
"""JSON types by their names in schemas; clients also write those of other languages."""


@dataclass(frozen=True)
class Number:
    """A JSON number as it was written: as a float it could lose digits."""

    text: str


def number(text: str) -> Number | str:
    """Return a number by JSON's text of it; the text itself if programs cannot hold the number."""
    if _INTEGER.fullmatch(text):
        return Number(text) if len(text) <= _MAX_DIGITS else text
    return Number(text) if math.isfinite(float(text)) else text


JSON = json.JSONDecoder(parse_float=number, parse_int=number, parse_constant=str, strict=False)
"""Reads JSON with exact numbers; NaN becomes a string, and strings may hold line breaks."""


def write(value: object) -> str:
    """Return JSON; raises ValueError, TypeError or RecursionError for what JSON cannot hold."""
    match value:
        case Number():
            return value.text
        case dict():
            return "{" + ", ".join(f"{to_json(str(k))}: {write(v)}" for k, v in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(write, value)) + "]"
    return to_json(value)


class _JSONNames(ast.NodeTransformer):
    """Reads the names of JSON's constants as the constants."""

    constants: ClassVar = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        known = node.id in self.constants
        return ast.Constant(self.constants[node.id]) if known else node


def python_literal(text: str) -> object:
    """Return the value of a Python literal, in which JSON's names may stand for Python's.

    Raises ValueError for anything else, also for values that JSON cannot hold.
    """
    try:
        value = ast.literal_eval(_JSONNames().visit(ast.parse(text.strip(), mode="eval")))
        write(value)
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return value


def typed(raw: str, schema: object, root: Schema) -> object:
    """Return a parameter's value from its raw text, of the type that its schema requires.

    Text that is not of a required type stays text. So does text that may be a string, unless it is
    exactly the JSON of another type that the schema allows.

    root: the schema of all parameters, in which references are resolved
    """
    allowed = kinds(schema, root)
    if not allowed or "string" in allowed:
        exact = (value for value in _exact(raw) if not allowed or _kind(value) in allowed)
        return next(exact, raw)
    fitting = (fit for value in _readings(raw.strip()) for fit in _fitted(value, allowed))
    return next(fitting, raw)


def literal(raw: str, schema: object, root: Schema) -> object:
    """Return the value of a text in a form that quotes its strings, else the text itself."""
    value = next(_readings(raw.strip()), raw)
    return typed(raw, schema, root) if fitted(value, schema, root) is not value else value


def fitted(value: object, schema: object, root: Schema) -> object:
    """Return a value read from JSON, with a number or boolean as its text where it must be that."""
    kind, allowed = _kind(value), kinds(schema, root)
    misfit = allowed and kind not in allowed and kind in ("integer", "number", "boolean")
    return typed(write(value), schema, root) if misfit else value


def kinds(schema: object, root: Schema) -> frozenset[str]:
    """Return the JSON types that a schema allows; none if it does not say."""
    try:
        return _kinds(schema, _References(root))
    except RecursionError:
        return frozenset()


def parameter(root: Schema, key: str) -> object:
    """Return the schema of one parameter; an empty one if there is none."""
    with contextlib.suppress(RecursionError):
        for part in _References(root).parts(root, choices=True):
            properties = part.get("properties")
            if isinstance(properties, Mapping) and key in properties:
                return properties[key]
    extra = root.get("additionalProperties")
    return extra if isinstance(extra, Mapping) else {}


def _decoded(text: str) -> Iterator[object]:
    """Yield the value of a text that is JSON, if it is not nested too deeply to be written."""
    with contextlib.suppress(ValueError, RecursionError):
        value = JSON.decode(text)
        write(value)
        yield value


def _exact(text: str) -> Iterator[object]:
    """Yield the value, if there is any, whose JSON is exactly this text and which is no string."""
    for value in _decoded(text):
        kind = _kind(value)
        if kind in ("array", "object") or (kind != "string" and _canonical(value) == text):
            yield value


def _readings(text: str) -> Iterator[object]:
    """Yield the values that a text may stand for: in JSON, in Python, as any decimal number."""
    yield from _decoded(text)
    if text.lower() in ("true", "false"):
        yield text.lower() == "true"
    if text == "None":
        yield None
    if text[:1] in ("[", "{", "(", "'", '"'):
        with contextlib.suppress(ValueError):
            yield python_literal(text)
    with contextlib.suppress(ArithmeticError):
        exact = Decimal(text)
        if exact.is_finite():
            yield number(str(exact))


def _fitted(value: object, allowed: frozenset[str]) -> Iterator[object]:
    """Yield a value if its type is allowed, or else the integer that it is equal to."""
    if _kind(value) in allowed:
        yield value
    elif isinstance(value, Number) and "integer" in allowed:
        exact = Decimal(value.text)
        if exact == exact.to_integral_value():
            yield Number(str(int(exact)))


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case Number():
            return "integer" if _INTEGER.fullmatch(value.text) else "number"
        case int():
            return "integer"
        case float():
            return "number"
        case dict():
            return "object"
        case list() | tuple():
            return "array"
    return "string"


def _canonical(value: object) -> str:
    """Return the JSON that programs write for a constant or a number."""
    if not isinstance(value, Number):
        return write(value)
    whole = bool(_INTEGER.fullmatch(value.text))
    return str(int(value.text)) if whole else repr(float(value.text))


class _References:
    """Walks through a schema and what it refers to, in a limited number of steps."""

    def __init__(self, root: Schema) -> None:
        self._root, self._steps = root, 0

    def parts(self, schema: object, *, choices: bool = False) -> Iterator[Schema]:
        """Yield a schema, those it refers to and is made of, and with `choices` its alternatives.

        Raises RecursionError after too many steps, for references in a circle too.
        """
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise RecursionError
        if not isinstance(schema, Mapping):
            return
        yield schema
        ref = schema.get("$ref")
        if isinstance(ref, str):
            yield from self.parts(self._resolved(ref), choices=choices)
        for keyword in ("allOf", *(("anyOf", "oneOf") if choices else ())):
            branches = schema.get(keyword)
            for branch in branches if isinstance(branches, list) else []:
                yield from self.parts(branch, choices=choices)

    def _resolved(self, ref: str) -> object:
        """Return what a reference within the schema points to; None if there is nothing."""
        found: object = self._root if ref.startswith("#") else None
        for step in ref.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            found = found.get(step) if isinstance(found, Mapping) else None
        return found


def _kinds(schema: object, references: _References) -> frozenset[str]:
    found: frozenset[str] = frozenset()
    for part in references.parts(schema):
        for allowed in _said_by(part, references):
            found = found & allowed or allowed if found else allowed
    return found


def _said_by(part: Schema, references: _References) -> Iterator[frozenset[str]]:
    """Yield the types that each keyword of a schema allows, of those that say any."""
    given = part.get("type")
    names = [str(n).lower() for n in (given if isinstance(given, list) else [given]) if n]
    if names and all(name in _KINDS for name in names):
        nullable = ["null"] if part.get("nullable") is True else []
        yield frozenset(kind for name in [*names, *nullable] for kind in _KINDS[name])
    values = part.get("enum", [part["const"]] if "const" in part else None)
    if isinstance(values, list) and values:
        yield frozenset(_kind(value) for value in values)
    for keyword in ("anyOf", "oneOf"):
        branches = part.get(keyword)
        if isinstance(branches, list) and branches:
            each = [_kinds(branch, references) for branch in branches]
            if all(each):
                yield frozenset().union(*each)
    for keyword, kind in (("properties", "object"), ("items", "array")):
        if not names and isinstance(part.get(keyword), Mapping):
            yield frozenset({kind})
