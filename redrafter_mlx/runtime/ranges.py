"""Lists on the command line: `3`, `1..4`, `1-4`, `1,2,4`, `0,0.3,0.7`, `sample,typical`."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable
from typing import TypeVar

from redrafter_mlx.errors import BadInputError

_SPAN = re.compile(r"(\d{1,9})(?:(?:\.\.|-)(\d{1,9}))?")
_MAX_VALUES = 1024

T = TypeVar("T", bound=Hashable)


def parse_integers(name: str, text: str) -> list[int]:
    """Parse whole numbers, each once in the order given: `1..4`, `1-4`, `1,2,4`, `1,3..5`.

    Raises:
      BadInputError: naming the option and the part that is wrong
    """
    numbers: list[int] = []
    for part in _parts(name, text):
        match = _SPAN.fullmatch(part)
        if match is None:
            raise BadInputError(f"{name} holds {part!r}; give 3, 1..4, 1-4 or 1,2,4")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise BadInputError(
                f"{name} holds {part!r}, which runs backwards; give {last}..{first}"
            )
        if last - first >= _MAX_VALUES:
            raise BadInputError(f"{name} holds {part!r}, which is too many; at most {_MAX_VALUES}")
        numbers.extend(range(first, last + 1))
    return each_once(numbers)


def parse_numbers(name: str, text: str) -> list[float]:
    """Parse numbers, each once in the order given: `0,0.3,1`; raises as `parse_integers`."""
    numbers = []
    for part in _parts(name, text):
        try:
            numbers.append(float(part))
        except ValueError:
            numbers.append(math.nan)
        if not math.isfinite(numbers[-1]):
            raise BadInputError(f"{name} holds {part!r}; give numbers such as 0,0.3,0.7")
    return each_once(numbers)


def parse_words(name: str, text: str) -> list[str]:
    """Parse words, each once in the order given; raises BadInputError for an empty one."""
    return each_once(_parts(name, text))


def each_once(items: Iterable[T]) -> list[T]:
    """Return the items without repetitions, in the order of their first occurrences."""
    return list(dict.fromkeys(items))


def _parts(name: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise BadInputError(f"{name} is {text!r}, where something is missing; give a list like a,b")
    return parts
