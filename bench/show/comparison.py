"""The table of `bench --compare`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from redrafter_mlx.bench.analyse.compare import Change
from redrafter_mlx.bench.show.tables import TextTable, spread


def compare_table(
    changes: Sequence[Change], before: str, after: str, differing: Sequence[str]
) -> TextTable:
    """Return a table of the figures that two results share; the note tells what else differs."""
    cells = tuple(
        (_describe(c.row), c.figure, spread(c.before), spread(c.after), spread(c.ratio, "x"),
         c.verdict)
        for c in changes
    )  # fmt: skip
    columns = ("row", "figure", before, after, "ratio", "verdict")
    note = "Brackets hold 95% intervals, over questions too: between runs of the same questions, "
    note += "differences that are smaller than those between questions do not show."
    if differing:
        note += f" What else differs: {'; '.join(differing)}."
    return TextTable(f"{after} over {before}", columns, cells, note)


def _describe(row: Mapping[str, object]) -> str:
    """Describe a row of a saved result in words."""
    named = [str(row[key]) for key in ("method", "drafter", "dtype") if row.get(key)]
    parts = named if row.get("batch_size") is None else [*named, f"batch of {row['batch_size']}"]
    W, L = row["beam_width"], row["beam_length"]
    if (W, L) != (None, None):
        parts.append(" x ".join("auto" if side is None else str(side) for side in (W, L)))
    if row["temperature"]:
        parts.append(f"{row['accept'] or ''} T {row['temperature']}".strip())
    for name in ("prefixes", "epsilon", "delta", "max_nodes", "draft_tokens", "prompt_tokens"):
        if row.get(name) not in (None, "all"):
            parts.append(f"{name.replace('_', ' ')} {row[name]}")
    return ", ".join([*parts, *([str(row["category"])] if row.get("category") else [])])
