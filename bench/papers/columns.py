"""Tables of measured rows, with the published figures of the same settings beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from redrafter_mlx.bench.measure.methods import Method
from redrafter_mlx.bench.papers.published import Record, shown
from redrafter_mlx.bench.show.tables import TextTable

Settings = Mapping[str, object]
"""Settings of a row by the heading of their column; None where a setting does not apply."""

Cells = Callable[[str], str]
"""Returns a row's cell in the column with this heading."""

_HEADINGS = {"temperature": "T", "beam_width": "W", "beam_length": "L",
             "batch_size": "requests"}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """A table of measured rows."""

    title: str
    columns: str = ""  # headings and commas; each setting that varies and has none gets its own
    note: str = ""  # the line below the table
    beside: tuple[str, ...] = ()  # by which a row is paired with a published one; empty shows none
    apart: tuple[str, ...] = ()  # columns of the published table whose values head a column each
    covers: tuple[str, ...] = ()  # settings that a column shows under another heading

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Layout:
        lists: dict[str, Any] = {k: tuple(v) for k, v in data.items() if isinstance(v, list)}
        return cls(**{**data, **lists})


def settings_of(
    method: Method, dtype: str | None = None, prompt_tokens: int | None = None
) -> dict[str, object]:
    """Return the dtype, the length of prompts, and the method's fields, apart from its name."""
    fields = asdict(method)
    if fields.pop("name") != "redrafter":
        fields["prefixes"] = None
    named = {_HEADINGS.get(name, name.replace("_", " ")): value for name, value in fields.items()}
    return {"dtype": dtype, "prompt tokens": prompt_tokens, **named}


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
    layout: Layout,
    lines: Sequence[tuple[Settings, Cells]],
    known: Sequence[Record] = (),
    note: str = "",
) -> TextTable:
    """Return the table of these lines, which are the settings and the cells of each row.

    Columns without a cell, such as the name of the only drafter, are left out. `known` are the
    published rows; `note` is added to the layout's own.
    """
    columns = layout.columns.split(", ")
    shown_otherwise = {*columns, *layout.covers}
    more = [h for h in varying(each for each, _ in lines) if h not in shown_otherwise]
    rows = []
    for settings, cell in lines:
        own = {**{h: cell(h) for h in columns}, **{h: setting(settings.get(h)) for h in more}}
        rows.append({**own, **_published(layout, own, known)})
    empty = {h for row in rows for h in row} - {
        h for row in rows for h, cell in row.items() if cell
    }
    rows = [{h: cell for h, cell in row.items() if h not in empty} for row in rows]
    hidden = {*layout.beside, *layout.apart}
    figures = [name for name in (known[0] if known else ()) if name not in hidden]
    beside = f"published: {', '.join(figures)}" if layout.beside and figures else ""
    notes = filter(None, (layout.note, beside, note))
    return TextTable.of(layout.title, rows, "; ".join(notes))


def _published(layout: Layout, own: Mapping[str, str], known: Sequence[Record]) -> dict[str, str]:
    """Return the published figures of a row's settings, by the heading of their column."""
    hidden = {*layout.beside, *layout.apart}
    found: dict[str, str] = {}
    for record in known if layout.beside else ():
        heading = ", ".join(str(record[name]) for name in layout.apart) or "published"
        found.setdefault(heading, "")
        if all(own[name] == setting(record[name]) for name in layout.beside):
            figures = {name: value for name, value in record.items() if name not in hidden}
            found[heading] = ", ".join(
                shown(value) + ("x" if name == "speedup" else "") for name, value in figures.items()
            )
    return found
