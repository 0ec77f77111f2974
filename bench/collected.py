"""What the tables of the papers need beside times, collected while the models are in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mlx_lm.utils import get_total_parameters

from redrafter_mlx.bench.analyse.result import Result
from redrafter_mlx.bench.measure.activity import Activity
from redrafter_mlx.bench.measure.answers import Answer, AnswerKey
from redrafter_mlx.bench.measure.likelihood import Likelihood, likelihood
from redrafter_mlx.bench.measure.methods import Method
from redrafter_mlx.bench.measure.plan import Plan
from redrafter_mlx.bench.measure.runner import Runner
from redrafter_mlx.bench.models import measure_machine
from redrafter_mlx.bench.papers.evidence import Evidence
from redrafter_mlx.bench.papers.protocols import Inspects
from redrafter_mlx.bench.statistics import Percentiles
from redrafter_mlx.distill.options_file import OPTIONS, read_options
from redrafter_mlx.distill.report.metrics import read_metrics
from redrafter_mlx.engine.engine import Redrafter

_FEW = 8
"""Maximum number of questions whose answers show how large merged trees are."""


@dataclass
class Collected:
    """The callbacks of `run_session`, and what they found; see `Evidence`.

    choose_capacity: whether calls of merged candidates get the size that these have
    folders:         folders that drafters were loaded from, by the drafter's name
    """

    inspects: Inspects
    choose_capacity: bool
    activity: Activity
    folders: dict[str | None, Path] = field(default_factory=dict)
    sizes: dict[str | None, int] = field(default_factory=dict)
    likelihoods: dict[AnswerKey, Likelihood] = field(default_factory=dict)
    draft_costs: dict[str, float] = field(default_factory=dict)

    def prepare(self, drafters: Mapping[str | None, Redrafter], plan: Plan, runner: Runner) -> Plan:
        """Record the drafters before anything is timed; return the plan to measure."""
        for name, loaded in drafters.items():
            if loaded.drafter is not None:
                self.sizes[name] = sum(map(get_total_parameters, loaded.drafter.modules))
                if loaded.drafter.folder is not None:
                    self.folders[name] = loaded.drafter.folder
        return _fit_calls(plan, runner, self.activity) if self.choose_capacity else plan

    def inspect(self, drafters: Mapping[str | None, Redrafter], answers: Sequence[Answer]) -> None:
        """Compute likelihoods or draft costs after the answers of one loading."""
        first = next(iter(drafters.values()))
        if self.inspects == "likelihoods":
            with self.activity("reading the answers", "{} of {}".format) as progress:
                for n, answer in enumerate(answers, 1):
                    found = likelihood(first, answer.prompt_ids, answer.run.token_ids)
                    if found is not None:
                        self.likelihoods[answer.key] = found
                    progress("answers", n, len(answers))
        if self.inspects == "draft costs" and answers and first.tuning is not None:
            measure_machine(first, self.activity)
            costs, drafts = first.tuning.costs, 4
            level = costs.drafting(1, drafts + 1) / drafts
            self.draft_costs[answers[0].dtype] = level / costs.verify(1, costs.short_context)

    def evidence(self, results: Sequence[Result], answers: Sequence[Answer]) -> Evidence:
        """Return the evidence for a table of these results."""
        return Evidence(
            rows=[row for each in results for row in each.rows], answers=answers,
            likelihoods=self.likelihoods, draft_costs=self.draft_costs,
            logs={name: read_metrics(folder) for name, folder in self.folders.items()},
            options=training_options(self.folders), sizes=self.sizes,
        )  # fmt: skip


def training_options(folders: Mapping[str | None, Path]) -> dict[str | None, Mapping[str, Any]]:
    """Read the training options in the folders, by drafter name."""
    paths = {name: folder / OPTIONS for name, folder in folders.items()}
    return {name: read_options(path) for name, path in paths.items() if path.is_file()}


def _fit_calls(plan: Plan, runner: Runner, activity: Activity) -> Plan:
    """Give merged candidates calls of the size that 99% of their trees had in a few answers.

    A call of the largest size that they can have would be as large as without merging.
    """
    merged = [method for method in plan.methods if method.prefixes == "final"]
    few = plan.questions[:: -(-len(plan.questions) // _FEW)]
    capacity: dict[Method, int] = {}
    with activity("packing beams", "{} of {}".format) as progress:
        for done, method in enumerate(merged, 1):
            runs = [runner.run(method, q.prompt_ids, plan.max_tokens, plan.seed) for q in few]
            if found := Percentiles.of([nodes for run in runs for nodes in run.nodes]):
                capacity[method] = math.ceil(found.p99)
            progress("beam shapes", done, len(merged))
    methods = [replace(m, max_nodes=capacity.get(m, m.max_nodes)) for m in plan.methods]
    return replace(plan, methods=methods)
