"""Columns for the settings in which the rows of a paper's table differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from redrafter_mlx.bench.measure.methods import Method
from redrafter_mlx.bench.show.tables import TextTable

Settings = Mapping[str, object]
"""Settings of a row by the heading of their column; None where a setting does not apply."""

_HEADINGS = {"temperature": "T", "beam_width": "W", "beam_length": "L"}


def settings_of(method: Method, dtype: str | None = None) -> dict[str, object]:
    """Return the dtype and the method's fields, apart from its name."""
    fields = asdict(method)
    if fields.pop("name") != "redrafter":
        fields["prefixes"] = None
    named = {_HEADINGS.get(name, name.replace("_", " ")): value for name, value in fields.items()}
    return {"dtype": dtype, **named}


def varying(settings: Iterable[Settings]) -> list[str]:
    """Return the headings of the settings that have several values."""
    values: dict[str, set[object]] = {}
    for each in settings:
        for heading, value in each.items():
            values.setdefault(heading, set()).update(set() if value is None else {value})
    return [heading for heading, found in values.items() if len(found) > 1]


def setting(value: object) -> str:
    """Format a setting for a cell."""
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def paper_table(
    title: str,
    lines: Sequence[tuple[Settings, Mapping[str, str]]],
    note: str = "",
    shown: Sequence[str] = (),
) -> TextTable:
    """Return a table with a further column for each setting that varies and has none yet.

    Args:
      lines: the settings of each line, and its cells by column name
      shown: settings that a column shows under another heading
    """
    more = [h for h in varying(each for each, _ in lines) if h not in (*lines[0][1], *shown)]
    rows = [{**cells, **{h: setting(each.get(h)) for h in more}} for each, cells in lines]
    return TextTable.of(title, rows, note)
