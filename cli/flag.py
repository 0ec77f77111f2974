"""One option of the command line: its names and help, and how its text becomes a value.

Whole numbers are read as people type them: `24GB`, `24 GiB`, `1.5M`, `1e6`, `16_384`, `2,000,000`.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
import re
from dataclasses import dataclass
from decimal import Decimal
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.words import option_name

POSITIONAL = "_argument"
"""Ends the name of the parameter of a positional argument that has an option, too."""

_WHOLE = (int, int | None)  # types of options that `whole_number` reads


_NUMBER = re.compile(
    r"([+-]?(?:\d[\d_,]*)?(?:\.\d+)?(?:e[+-]?\d{1,2})?)\s*(?:([kmgt])(i)?)?(b?)", re.I
)

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(frozen=True)
class Flag:
    """How a dataclass's field, or a command's parameter, appears on the command line.

    A `~` at the start of a FILE or a DIR is the home folder, which no shell expands after `=`.
    """

    help: str
    metavar: str | None = None
    panel: str | None = None  # the heading under which `--help` lists it; None for the first one
    names: tuple[str, ...] = ()  # if empty, `option_name`'s; `--no-draft` sets `draft` to False
    variable: str | None = None  # environment variable that gives it if the command line does not
    minimum: int | None = None  # smallest number that is accepted
    argument: str | None = None  # metavar of a positional argument that gives it too
    unit: int = 1  # what a whole number counts, see `whole_number`

    def parameter(self, name: str, hint: object, default: Any) -> inspect.Parameter:
        """Return the parameter that typer makes an option of; required if `default` is `...`."""
        if hint == tuple[str, ...]:
            hint, default = list[str] | None, default or None
        if hint in _WHOLE:
            hint, default = str | None, default if default in (..., None) else str(default)
        option = typer.Option(
            not default if self._negated else default,
            *self._names(name),
            help=self.help,
            metavar=self.metavar,
            rich_help_panel=self.panel,
            envvar=self.variable,
            show_envvar=False,
        )
        keyword = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(name, keyword, default=option, annotation=_without_literal(hint))

    def positional(self, name: str) -> inspect.Parameter:
        """Return the parameter that typer makes the positional argument of."""
        argument = typer.Argument(metavar=self.argument, help=self.help, show_default=False)
        annotation = Annotated[str | None, argument]
        keyword = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(name + POSITIONAL, keyword, default=None, annotation=annotation)

    def merged(self, name: str, argument: str | None, option: str | None) -> str | None:
        """Return the value of either; raises BadInputError if both are given."""
        if argument is not None and option is not None:
            raise BadInputError(
                f"{self.argument} is given twice, as {argument!r:.200} and by "
                f"{self._names(name)[0]} {option!r:.200}; give one of them"
            )
        return option if argument is None else argument

    def value(self, name: str, hint: object, given: Any) -> object:
        """Return the field's value for that of typer's option."""
        if isinstance(given, list):
            return tuple(map(self._expanded, given))
        if isinstance(given, str):
            return self._whole(name, given) if hint in _WHOLE else self._expanded(given)
        return not given if self._negated else given

    def _whole(self, name: str, text: str) -> int:
        try:
            number = whole_number(text, self.unit)
            if self.minimum is not None and number < self.minimum:
                raise ValueError(f"{number} is less than {self.minimum}")
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=f"'{self._names(name)[0]}'") from None
        return number

    def _expanded(self, given: str) -> str:
        """Return a path with its home folder, and any other text as it is."""
        path = (self.metavar or "").startswith(("FILE", "DIR"))
        return os.path.expanduser(given) if path else given

    def _names(self, name: str) -> tuple[str, ...]:
        return self.names or (option_name(name),)

    @property
    def _negated(self) -> bool:
        return self.names[:1] != () and self.names[0].startswith("--no-")


def _without_literal(hint: object) -> object:
    """Return a type as typer takes it: `str` for a Literal."""
    hints = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return functools.reduce(operator.or_, (str if get_origin(h) is Literal else h for h in hints))


def whole_number(text: str, unit: int = 1) -> int:
    """Parse a whole number, with k for 1000 or Ki for 1024 and so on, and with or without a B.

    unit: what a number without a multiple, and the result, counts: 1_000_000 for megabytes
    Raises ValueError, saying what to give.
    """
    found = _NUMBER.fullmatch(text.strip())
    if found is None or not any(map(str.isdigit, found[1])):
        raise ValueError(f"{text!r:.80} is no number; give one such as 2000, 1.5M, 1e6 or 24GB")
    digits, multiple, binary, _ = found.groups()
    number = Decimal(re.sub("[_,]", "", digits))
    if multiple:
        number = number * (1024 if binary else 1000) ** _POWERS[multiple.lower()] / unit
    if number != int(number):
        raise ValueError(f"{text!r:.80} is no whole number")
    return int(number)
