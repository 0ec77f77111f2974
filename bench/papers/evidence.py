"""The measurements that a table of a paper is made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from redrafter_mlx.bench.analyse.summary import Row
from redrafter_mlx.bench.measure.answers import Answer, AnswerKey
from redrafter_mlx.bench.measure.likelihood import Likelihood
from redrafter_mlx.bench.measure.questions import WHOLE


@dataclass(frozen=True)
class Evidence:
    """Measurements of several kinds; those that a table does not use are empty.

    rows, answers: of the requests, see `summarise`
    likelihoods:   of the answers' texts under the target
    draft_costs:   by dtype: cost of a draft, divided by that of a target call with one query row
    logs, options: of training runs, as in their files, by the drafter's name
    sizes:         number of a drafter's parameters, by its name
    """

    rows: Sequence[Row] = ()
    answers: Sequence[Answer] = ()
    likelihoods: Mapping[AnswerKey, Likelihood] = field(default_factory=dict)
    draft_costs: Mapping[str, float] = field(default_factory=dict)
    logs: Mapping[str | None, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    options: Mapping[str | None, Mapping[str, Any]] = field(default_factory=dict)
    sizes: Mapping[str | None, int] = field(default_factory=dict)

    def answers_of(self, row: Row) -> list[Answer]:
        """Return the answers that a row over all questions summarises."""
        return [a for a in self.answers if (a.dtype, a.method) == (row.dtype, row.method)]

    def options_of(self, row: Row) -> Mapping[str, Any]:
        """Return the options that a row's drafter was trained with; empty if they are not known."""
        return self.options.get(row.method.drafter, {})

    @property
    def whole(self) -> list[Row]:
        """Rows over all questions."""
        return [row for row in self.rows if row.category == WHOLE]

    @property
    def with_categories(self) -> list[Row]:
        """Rows of drafters and of mlx-lm's speculative decoding, also by category."""
        names = ("redrafter", "mlx-lm speculative")
        return [row for row in self.rows if row.method.name in names]

    @property
    def drafted(self) -> list[Row]:
        """Rows over all questions that used drafts."""
        return [row for row in self.whole if row.method.name == "redrafter"]
