"""Values that callers give: made Python's own, and checked by errors that name the option."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, get_args

from redrafter_mlx.errors import BadInputError, meant

_PLAIN = (bool, int, float, str)


def refuse_unknown_keys(given: Mapping[str, object], known: list[str], what: str) -> None:
    """Raise BadInputError naming the first key of `given` that is not among `known`."""
    for key in given:
        if key not in known:
            raise BadInputError(f"unknown {what} {key!r}; {meant(key, known)}")


def check_choice(name: str, value: str, choices: object) -> None:
    """Raise BadInputError unless `value` is one of the strings of a Literal type."""
    known = get_args(choices)
    if value not in known:
        raise BadInputError(f"{name} is {shown(value)}; choose one of {', '.join(map(str, known))}")


def check_int(name: str, value: object, low: int, high: int | None) -> None:
    """Raise BadInputError unless `value` is a whole number from `low` to `high`, both included."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadInputError(f"{name} is {shown(value)}; it must be a whole number")
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise BadInputError(f"{name} is {shown(value)}; it must be {bound}")


def check_number(
    name: str, value: object, low: float, high: float = math.inf, low_excluded: bool = False
) -> None:
    """Raise BadInputError unless `value` is a finite number within its limits."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not abs(value) <= sys.float_info.max  # NaN, or an int beyond the range of float
    ):
        raise BadInputError(f"{name} is {shown(value)}; it must be a number")
    if value < low or value > high or (low_excluded and value == low):
        above = f"above {low:g}" if low_excluded else f"at least {low:g}"
        limit = "" if high == math.inf else f" and at most {high:g}"
        raise BadInputError(f"{name} is {value:g}; it must be {above}{limit}")


def shown(value: object) -> str:
    """Return a value as text for a message, at most 80 characters."""
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python prints no integer of more than 4,300 digits
        return "a number of thousands of digits"


def check_quantize(bits: int | None, name: str = "quantize") -> None:
    """Raise BadInputError, naming the option, unless numbers can be quantised to these bits."""
    if bits is not None and (isinstance(bits, bool) or bits not in (4, 8)):
        raise BadInputError(f"{name} is {bits!r}; it must be 4 or 8 bits")


def check_drafter_bits(bits: int | None, name: str = "drafter_bits") -> None:
    """Raise BadInputError, naming the option, unless a drafter's weights can have these bits."""
    if bits is not None and (isinstance(bits, bool) or bits not in (4, 8, 16)):
        raise BadInputError(f"{name} is {bits!r}; it must be 4, 8 or, as stored, 16 bits")


if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def plain(value: object) -> object:
    """Return Python's own form of a number, flag or array of NumPy's or MLX's.

    Members of lists and mappings are converted too. Any other value is returned as it is.
    """
    if value is None or type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        return {plain(key): plain(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        members = map(plain, value)
        return tuple(members) if isinstance(value, tuple) else list(members)
    tolist: Callable[[], object] | None = getattr(value, "tolist", None)
    return value if tolist is None else tolist()


def make_plain(options: DataclassInstance) -> None:
    """Make the fields of a new frozen dataclass `plain`."""
    for field in fields(options):
        object.__setattr__(options, field.name, plain(getattr(options, field.name)))
