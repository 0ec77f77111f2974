"""How each table of the papers is measured: read from the data files, see `published`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any, Literal

from redrafter_mlx.bench.measure.questions import Question
from redrafter_mlx.bench.papers import answer_tables as by_answer
from redrafter_mlx.bench.papers.columns import Layout
from redrafter_mlx.bench.papers.evidence import Evidence
from redrafter_mlx.bench.papers.published import (
    Published,
    Record,
    comparable,
    paper_data,
    published,
)
from redrafter_mlx.bench.show.tables import TextTable, number
from redrafter_mlx.errors import BadInputError, meant

Rows = Literal["drafted", "whole", "by category", "correlated", "along answers", "training logs"]
"""The `rows` of a data file."""


Inspects = Literal["likelihoods", "draft costs", "packed sizes"] | None


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
    "drafted": partial(by_answer.rows_table, lambda evidence: evidence.drafted),
    "whole": partial(by_answer.rows_table, lambda evidence: evidence.whole),
    "by category": partial(by_answer.rows_table, lambda evidence: evidence.with_categories),
    "correlated": partial(
        by_answer.rows_table, lambda evidence: evidence.drafted, note=by_answer.correlation_note
    ),
    "along answers": by_answer.along_table,
    "training logs": accuracy_table,
}


@dataclass(frozen=True)
class PaperProtocol:
    """How a table is measured."""

    name: str  # value of `--paper`
    rows: Rows | None = None  # what has a row; None if nothing is measured
    layout: Layout | None = None
    options: Mapping[str, object] = field(default_factory=dict)  # of `bench`; the command line wins
    question: Question | None = None  # the only question, unless the user names others
    drafters: int = 0  # number of drafters that the user must name; 0 if the options name them
    installed: bool = False  # whether every drafter on this machine that fits the model is measured
    speculative: bool = False  # whether the table also has rows of mlx-lm's speculative decoding
    inspects: Inspects = None  # what is measured in addition to time

    @classmethod
    def of(cls, name: str, data: Mapping[str, Any]) -> PaperProtocol:
        given = {**data, "layout": Layout.of(data["layout"])} if data else {}
        if "question" in given:
            given["question"] = Question(**given["question"])
        if "drafter" in given.get("options", {}):
            given["options"] = {**data["options"], "drafter": tuple(data["options"]["drafter"])}
        return cls(name, **given)

    @property
    def answers(self) -> bool:
        """Whether questions are answered: other tables are of training logs, or of nothing."""
        return self.rows not in ("training logs", None)

    @property
    def batched(self) -> bool:
        """Whether several requests are answered at once."""
        return "batch_size" in self.options

    @property
    def published(self) -> Published:
        return published(self.name)

    def measured(self, evidence: Evidence) -> TextTable:
        """Return the table of what was measured."""
        assert self.rows is not None, "the published figures alone"
        assert self.layout is not None, "every table of rows has one"
        return TABLES[self.rows](self.layout, evidence, comparable(self.name))


PROTOCOLS = tuple(
    PaperProtocol.of(name, data.get("measured", {})) for name, data in paper_data().items()
)


def find_protocol(name: str) -> PaperProtocol:
    """Return the protocol with this name; raises BadInputError if there is none."""
    by_name = {protocol.name: protocol for protocol in PROTOCOLS}
    if name not in by_name:
        raise BadInputError(f"--paper is {name!r}; {meant(name, by_name)}")
    return by_name[name]
