"""JSON schemas as clients write them, as terms of llguidance's Lark."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from llguidance import LLMatcher

from redrafter_mlx.errors import BadInputError

Json = dict[str, Any]

_WHITE_SPACE = r"\n? {0,20}"
"""White space between JSON's tokens: bounded, as a small model may otherwise write nothing else."""

_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value is an object of schemas, by names that are no keywords."""

_OF_VALUES = ("const", "default", "enum", "example", "examples")
"""Keywords whose value is JSON, not a schema."""

_OF_PARTS = ("$ref", "allOf", "anyOf", "dependentSchemas", "if", "oneOf")
"""Keywords that describe one object in several parts."""

UNUSABLE = "the JSON schema cannot be used"

_MAX_REFERENCES = 256
"""llguidance follows a chain of references on its stack, which is full after 750 on Linux."""

_MAX_SETS = 256
"""Maximum number of sets of properties, each a grammar of its own."""

_MAX_CHARACTERS = 1000
"""Maximum length of a format or pattern that is tried, and remembered."""

_IN_SCHEMA = "failed to compile JSON schema: "
"""What llguidance writes before the reason."""


def json_term(schema: Mapping[str, object], *, lenient: bool = False) -> str:
    """Return a Lark term for JSON that matches a schema.

    - `oneOf` is read as `anyOf`: the output may match two of its schemas.
    - An object has only its `properties`, unless `additionalProperties` is given, it requires
      others, or the schema describes an object in several parts, each with properties of its own.
    - Properties are counted where only those listed may be there.
    - An unknown `format` is ignored, and so is a keyword whose value is null.
    - Another rule that llguidance does not support is an error; with `lenient` it is ignored, and
      the output may break it.
    """
    options = {"whitespace_pattern": _WHITE_SPACE, "coerce_one_of": True, "lenient": lenient}
    try:
        copied = json.loads(json.dumps(schema, allow_nan=False))
        schemas = list(_schemas_in(copied))
        if sum("$ref" in one for one in schemas) > _MAX_REFERENCES:
            raise ValueError(f"it has more than {_MAX_REFERENCES} references")
        for one in schemas:
            _drop_ignored(one, lenient)
        if not any(map(_has_parts, schemas)):
            for one in schemas:
                if _names_its_properties(one):
                    one.setdefault("additionalProperties", False)
        for one in schemas:
            _count_properties(one, lenient)
        text = json.dumps({**copied, "x-guidance": options})
    except (ValueError, TypeError, RecursionError) as error:
        raise BadInputError(f"{UNUSABLE}: {error}") from error
    return f"%json {text}"


def _count_properties(schema: Json, lenient: bool) -> None:
    """Write `minProperties` and `maxProperties` as the sets of properties that an object may have.

    llguidance counts to two and more only if all the listed properties are required. With others
    beside those listed, or with very many sets, that stays its error, or ignored with `lenient`.
    """
    named, given, parts = (schema.get(key, []) for key in ("properties", "required", "allOf"))
    if not isinstance(named, dict) or not isinstance(given, list) or not isinstance(parts, list):
        return
    low, high = schema.get("minProperties", 0), schema.get("maxProperties", len(named))
    required = [name for name in named if name in given]
    optional = [name for name in named if name not in given]
    if not optional or not isinstance(low, int) or not isinstance(high, int):
        return
    minimum, maximum = max(low - len(required), 0), min(high - len(required), len(optional))
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if maximum == len(optional) and minimum <= (1 if closed else 0):  # llguidance counts to one
        return
    sizes = range(minimum, (minimum if maximum == len(optional) else maximum) + 1)
    if closed and minimum > maximum:
        raise ValueError(f"it has {len(required)} to {len(named)} properties, not {low} to {high}")
    if not closed or sum(math.comb(len(optional), size) for size in sizes) > _MAX_SETS:
        if lenient:
            schema.pop("minProperties", None)
            schema.pop("maxProperties", None)
        return
    sets: list[Json] = []
    for chosen in itertools.chain(*(itertools.combinations(optional, size) for size in sizes)):
        absent = [name for name in optional if name not in chosen and maximum < len(optional)]
        one = {"required": [*required, *chosen], "properties": dict.fromkeys(absent, False)}
        sets.append(one)
    schema.pop("minProperties", None)
    schema.pop("maxProperties", None)
    schema["allOf"] = [*parts, {"anyOf": sets}]


def _names_its_properties(schema: Json) -> bool:
    """Whether an object has `properties`, among them all that it requires."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict):
        return False
    return not isinstance(required, list) or all(
        isinstance(name, str) and name in properties for name in required
    )


def fault_of(term: str) -> str | None:
    """Return why a grammar with this term cannot be used; None if it can."""
    error = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(f"start: {term}"))
    return reason(error) or None


def reason(error: str) -> str:
    """Return the reason in an error of llguidance, in one line."""
    return error.partition("\n")[0].rpartition(_IN_SCHEMA)[2]


def _schemas_in(schema: object) -> Iterator[Json]:
    """Yield a schema and all schemas in it."""
    pending = [schema]
    while pending:
        one = pending.pop()
        if isinstance(one, list):
            pending += one
        elif isinstance(one, dict):
            yield one
            for key, value in one.items():
                if key in _OF_NAMES and isinstance(value, dict):
                    pending += value.values()
                elif key not in _OF_VALUES:
                    pending.append(value)


def _drop_ignored(schema: Json, lenient: bool) -> None:
    """Remove the keywords of a schema, not of those in it, that do not restrict the output."""
    for key, value in list(schema.items()):
        if (
            key == "$schema"
            or (value is None and key not in _OF_VALUES)
            or (key == "propertyNames" and value == {"type": "string"})
            or (key == "format" and not _supports(key, value))
            or (key == "pattern" and lenient and not _supports(key, value))
        ):
            del schema[key]


@functools.lru_cache(1024)
def _supports_text(keyword: str, value: str) -> bool:
    return fault_of(f"%json {json.dumps({'type': 'string', keyword: value})}") is None


def _supports(keyword: str, value: object) -> bool:
    """Whether llguidance supports this value of a keyword for strings."""
    if not isinstance(value, str) or len(value) > _MAX_CHARACTERS:
        return False
    return _supports_text(keyword, value)


def _has_parts(schema: Json) -> bool:
    """Whether a schema describes an object in several parts."""
    parts = schema.get("allOf")
    if isinstance(parts, list) and len(parts) > 1:
        return True
    own = not schema.keys().isdisjoint(("properties", "required"))
    return own and not schema.keys().isdisjoint(_OF_PARTS)
