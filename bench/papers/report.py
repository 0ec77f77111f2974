"""A paper's table for the terminal and as JSON: measured and published, with the conditions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from redrafter_mlx.bench.measure.machine import LoadedModel, Machine
from redrafter_mlx.bench.papers.published import Published, Setting, shown
from redrafter_mlx.bench.show.tables import OUT_OF_MEMORY, TextTable


@dataclass(frozen=True)
class Difference:
    """One condition of the measurement, in the paper and here."""

    what: str
    paper: str
    here: str


@dataclass(frozen=True)
class PaperResult:
    """A table of a paper: what was measured, what was published, and the conditions of both."""

    name: str
    published: Published
    measured: tuple[TextTable, ...]
    differences: tuple[Difference, ...]

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    @property
    def tables(self) -> list[TextTable]:
        """All tables, in reading order."""
        rows = tuple((each.what, each.paper, each.here) for each in self.differences)
        kinds = TextTable("What differs in kind", ("", self.published.paper, "here"), rows)
        return [*self.measured, published_table(self.published), kinds]


def published_table(published: Published) -> TextTable:
    """Return the paper's own figures; the note names those that are not at hand."""
    title = f"Published: {published.paper}, {published.number}, {published.title}"
    if not published.rows:
        return TextTable(title, ("figures",), ((f"not at hand: {published.missing}",),))
    missing = f"not at hand: {published.missing}" if published.missing else ""
    notes = [missing, published.source]
    if not published.across:
        rows = tuple(tuple(map(shown, row)) for row in published.rows)
        return TextTable(title, published.columns, rows, "; ".join(filter(None, notes)))
    at = published.columns.index(published.across)
    lines: dict[tuple[str | float | None, ...], dict[str, str]] = {}
    for row in published.rows:
        keys = zip(published.columns[:at], map(shown, row[:at]), strict=True)
        figures = [OUT_OF_MEMORY] if OUT_OF_MEMORY in row else map(shown, row[at + 1 :])
        line = lines.setdefault(row[:at], dict(keys))
        line[f"{published.across} {row[at]}"] = ", ".join(figures)
    notes.append(f"cells: {', '.join(published.columns[at + 1 :])}")
    return TextTable.of(title, [*lines.values()], "; ".join(filter(None, notes)))


def differences(
    published: Published,
    machine: Machine,
    models: Sequence[LoadedModel],
    questions: str,
    baseline: str,
    changed: Sequence[Difference],
) -> tuple[Difference, ...]:
    """Return the conditions of the paper and ours, and the options that were changed."""
    loaded = dict.fromkeys(
        f"{m.model} in {m.arithmetic}" + (f", {m.bits}-bit weights" if m.bits else "")
        for m in models
    )
    device = f"{machine.chip} ({machine.device}), MLX {machine.mlx}"
    here = Setting("; ".join(loaded), device, questions, baseline)
    theirs = vars(published.setting).items()
    return (*(Difference(name, value, getattr(here, name)) for name, value in theirs), *changed)
