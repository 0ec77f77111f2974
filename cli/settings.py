"""Options by name: from words that a person types, and from JSON that a file holds."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import fields
from types import NoneType
from typing import Literal, get_args, get_origin, get_type_hints

from redrafter_mlx.cli.terminal import check_text
from redrafter_mlx.config import GenerationOptions, refuse_unknown_keys
from redrafter_mlx.errors import BadInputError

_BOOLS = {"on": True, "true": True, "yes": True, "1": True,
          "off": False, "false": False, "no": False, "0": False}  # fmt: skip
_KINDS = {int: "a whole number", float: "a number", bool: "on or off", str: "text"}


def option_names() -> list[str]:
    """Every option that a person can spell, in the order of GenerationOptions.

    A logit bias names tokens by their numbers, and log-probabilities are arrays; both are for the
    library's callers. `prefixes` is for measuring.
    """
    unspoken = ("logit_bias", "logprobs", "prefixes")
    return [f.name for f in fields(GenerationOptions) if f.name not in unspoken]


def parse_setting(name: str, text: str) -> object:
    """The value of option `name` that `text` spells.

    `default` is the default; `none` leaves open what may be left open; `stop` takes several
    words, quoted where they hold spaces.

    Raises:
      BadInputError: no such option, or no such value
    """
    refuse_unknown_keys({name: text}, option_names(), "option")
    if text == "default":
        return getattr(GenerationOptions(), name)
    kinds = _kinds(name)
    if tuple in kinds:
        return () if text == "none" else _words(name, text)
    if text == "none" and NoneType in kinds:
        return None
    kind = next(k for k in kinds if k is not NoneType)
    try:
        return _BOOLS[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise BadInputError(f"{name} cannot be {text!r}; give {_expected(kinds)}") from None


def options_from_json(given: object, base: GenerationOptions) -> GenerationOptions:
    """`base` with what a saved conversation says; raises BadInputError naming what is wrong."""
    if not isinstance(given, Mapping):
        raise BadInputError("options is not a JSON object")
    refuse_unknown_keys(given, option_names(), "option")
    return base.updated({name: _from_json(name, value) for name, value in given.items()})


def _from_json(name: str, value: object) -> object:
    kinds = _kinds(name)
    if tuple in kinds:
        if isinstance(value, list) and all(isinstance(v, str) for v in value):
            return tuple(check_text("stop", v) for v in value)
    elif type(value) in kinds or (float in kinds and type(value) is int):
        return value
    raise BadInputError(f"{name} is {value!r}; it must be {_expected(kinds)}")


def _kinds(name: str) -> tuple[type, ...]:
    """The types that an option may have; `tuple` stands for several strings."""
    hint = get_type_hints(GenerationOptions)[name]
    if hint == tuple[str, ...]:
        return (tuple,)
    kinds = get_args(hint) or (hint,)
    return tuple(str if get_origin(kind) is Literal else kind for kind in kinds)


def _words(name: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError:
        raise BadInputError(f"{name} has an open quotation mark: {text}") from None


def _expected(kinds: tuple[type, ...]) -> str:
    if tuple in kinds:
        return "a list of strings"
    named = [_KINDS[k] for k in kinds if k is not NoneType]
    return " or ".join([*named, "none"] if NoneType in kinds else named)
