"""How each table of the papers is measured: read from the data files, see `published`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from redrafter_mlx.bench.measure.questions import Question
from redrafter_mlx.bench.papers.columns import Layout
from redrafter_mlx.bench.papers.evidence import Evidence
from redrafter_mlx.bench.papers.published import Published, comparable, paper_data, published
from redrafter_mlx.bench.papers.tables import TABLES, Rows
from redrafter_mlx.bench.show.tables import TextTable
from redrafter_mlx.errors import BadInputError, meant

Inspects = Literal["likelihoods", "draft costs", "packed sizes"] | None


@dataclass(frozen=True)
class PaperProtocol:
    """How a table is measured.

    name:     value of `--paper`
    rows:     what has a row; None if nothing is measured, and the published figures shown alone
    options:  options of `bench` by name; those of the command line take precedence
    question: the only question, unless the user names others
    drafters: number of drafters that the user must name; 0 if the options name them
    installed: whether every drafter on this machine that fits the model is measured
    speculative: whether the table also has rows of mlx-lm's speculative decoding
    inspects: what is measured in addition to time
    """

    name: str
    rows: Rows | None = None
    layout: Layout | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    question: Question | None = None
    drafters: int = 0
    installed: bool = False
    speculative: bool = False
    inspects: Inspects = None

    @classmethod
    def of(cls, name: str, data: Mapping[str, Any]) -> PaperProtocol:
        """Return the protocol in the `measured` object of a data file."""
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
        """The paper's own figures."""
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
