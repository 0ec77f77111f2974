"""Numbers and arrays of NumPy's and MLX's as Python's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_PLAIN = (bool, int, float, str)


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
