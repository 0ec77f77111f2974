"""The tables of the papers by what has a row in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Literal

from redrafter_mlx.bench.papers import answer_tables as by_answer
from redrafter_mlx.bench.papers.columns import Layout
from redrafter_mlx.bench.papers.evidence import Evidence
from redrafter_mlx.bench.papers.published import Record
from redrafter_mlx.bench.show.tables import TextTable, number

Rows = Literal["drafted", "whole", "by category", "correlated", "along answers", "training logs"]
"""The `rows` of a data file."""


def accuracy_table(layout: Layout, evidence: Evidence, known: Sequence[Record]) -> TextTable:
    """Return accuracy by the draft's position, at each evaluation of each run."""
    del known  # curves, which no paper prints as figures
    lines = []
    for name, log in evidence.logs.items():
        losses = {record["step"]: record["loss"] for record in log if record["event"] == "step"}
        for record in (each for each in log if each["event"] == "evaluation"):
            shares = zip_longest(record.get("training_top1", ()), record["top1"])
            drafts = {
                f"draft {n}": f"{number(training, '.1%') or 'not logged'} / {held_out:.1%}"
                for n, (training, held_out) in enumerate(shares, 1)
            }
            own = {
                "drafter": name or "", "step": str(record["step"]),
                "training loss": number(losses.get(record["step"]), ".3f"),
            }  # fmt: skip
            lines.append({**own, **drafts})
    return TextTable.of(layout.title, lines, layout.note)


TABLES: Mapping[Rows, Callable[[Layout, Evidence, Sequence[Record]], TextTable]] = {
    "drafted": by_answer.drafted_table,
    "whole": by_answer.whole_table,
    "by category": by_answer.category_table,
    "correlated": by_answer.correlated_table,
    "along answers": by_answer.along_table,
    "training logs": accuracy_table,
}
