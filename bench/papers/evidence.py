"""What was measured for a table of a paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redrafter_mlx.bench.analyse.batch_summary import BatchRow
from redrafter_mlx.bench.analyse.summary import WHOLE, Row
from redrafter_mlx.bench.measure.answers import Answer
from redrafter_mlx.bench.measure.likelihood import Likelihood
from redrafter_mlx.bench.measure.methods import Method

AnswerKey = tuple[str, Method, int | str, int]
"""Of an answer: dtype, method, question and repeat."""


@dataclass(frozen=True)
class Evidence:
    """Measurements of one kind or another; what a table has no use for is empty.

    rows, answers: of requests one by one
    likelihoods:   of the answers' texts under the target
    draft_costs:   a draft's cost over a target call's with one query row, by dtype
    batches:       of requests at once, by the length that their prompts were brought to
    logs:          of training runs, by their folders
    options:       of training runs, as their options files hold them, by the drafters' names
    """

    rows: Sequence[Row] = ()
    answers: Sequence[Answer] = ()
    likelihoods: Mapping[AnswerKey, Likelihood] = field(default_factory=dict)
    draft_costs: Mapping[str, float] = field(default_factory=dict)
    batches: Sequence[tuple[int | None, BatchRow]] = ()
    logs: Mapping[Path, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def answers_of(self, row: Row) -> list[Answer]:
        """Those that a row over all questions sums up."""
        return [a for a in self.answers if (a.dtype, a.method) == (row.dtype, row.method)]

    @property
    def whole(self) -> list[Row]:
        """Rows over all questions."""
        return [row for row in self.rows if row.category == WHOLE]

    @property
    def drafted(self) -> list[Row]:
        """Those of them that drafted."""
        return [row for row in self.whole if row.method.name == "redrafter"]
