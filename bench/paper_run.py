"""Repeats the measurement of a paper's table on the given model."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from mlx_lm.utils import get_total_parameters

from redrafter_mlx.bench.analyse.result import Result
from redrafter_mlx.bench.checks import check_measurement
from redrafter_mlx.bench.measure.answers import Answer, AnswerKey
from redrafter_mlx.bench.measure.likelihood import Likelihood, likelihood
from redrafter_mlx.bench.measure.methods import Method
from redrafter_mlx.bench.measure.plan import Plan
from redrafter_mlx.bench.measure.runner import Runner
from redrafter_mlx.bench.models import measure_machine
from redrafter_mlx.bench.options import Activity, BenchOptions
from redrafter_mlx.bench.papers.evidence import Evidence
from redrafter_mlx.bench.papers.protocols import Inspects, PaperProtocol
from redrafter_mlx.bench.papers.report import Difference, PaperResult, differences
from redrafter_mlx.bench.session import Hooks, Outcome, run_session
from redrafter_mlx.bench.statistics import Percentiles
from redrafter_mlx.distill.options_file import OPTIONS, read_options
from redrafter_mlx.distill.report.metrics import METRICS, read_metrics
from redrafter_mlx.drafting.files.installed import list_drafters
from redrafter_mlx.drafting.names import AUTO, TRAINED
from redrafter_mlx.drafting.untrained.host_drafters import LOOKUP
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import BadInputError, ModelNotFoundError
from redrafter_mlx.runtime.processes.launched import launched_rank
from redrafter_mlx.runtime.ranges import parse_numbers, parse_words
from redrafter_mlx.runtime.words import count, option_name
from redrafter_mlx.weights.registry import DEFAULT_MODEL

_ELSEWHERE = ("answers", "questions", "limit", "model", "offline", "seed")
"""Options that a table shows in other ways, or that change no figure but by chance."""

_NOTHING = Outcome([], False, [])

_FEW = 8  # maximum number of questions whose answers show how large merged trees are


class PaperRun(NamedTuple):
    """A table, and the measurement that it was computed from, which may be empty."""

    paper: PaperResult
    outcome: Outcome


def run_paper(
    protocol: PaperProtocol, options: BenchOptions, given: Collection[str], hooks: Hooks
) -> PaperRun:
    """Measure a table with the options that `fill` returned for the `given` ones."""
    if not protocol.answers:
        return _unmeasured(protocol, options)
    changed = _changed(protocol, options, given)
    check_measurement(options, None if options.batch_sizes else 1)
    if protocol.inspects == "draft costs" and len(options.drafters) > 1:
        raise BadInputError(f"--paper {protocol.name} is of one drafter; give one --drafter")
    if protocol.inspects in ("likelihoods", "draft costs") and launched_rank() is not None:
        raise BadInputError(
            f"--paper {protocol.name} looks at the model in one process; run it without mlx.launch"
        )
    merged = protocol.inspects == "packed sizes" and options.max_nodes is None
    seen = Collected(protocol.inspects, merged, hooks.activity)
    outcome = run_session(options, replace(hooks, prepare=seen.prepare, inspect=seen.inspect))
    evidence = seen.evidence(outcome.results, outcome.answers)
    return PaperRun(_paper(protocol, evidence, outcome.results[0], changed), outcome)


def fill(protocol: PaperProtocol, asked: BenchOptions, given: Collection[str]) -> BenchOptions:
    """Return the options, with the table's own values for those that are not `given` by name.

    Raises BadInputError for an option that the table does not use.
    """
    own = {name: value for name, value in protocol.options.items() if name not in given}
    if protocol.installed and "drafter" not in given:
        own["drafter"] = installed_drafters(asked.model or DEFAULT_MODEL)
    options = replace(asked, **own)  # type: ignore[arg-type]
    if protocol.question is not None and "questions" not in given:
        options = replace(options, only=(protocol.question,))
    if len({*options.drafter}) < protocol.drafters:
        number = "--drafter" if protocol.drafters == 1 else f"{protocol.drafters} times --drafter"
        raise BadInputError(f"--paper {protocol.name} compares drafters by name; give {number}")
    if not protocol.answers:
        used = {"paper", "json", *(["drafter"] if protocol.drafters else [])}
        if more := sorted({*given} - used):
            raise BadInputError(
                f"--paper {protocol.name} measures nothing; leave out {option_name(more[0])}"
            )
    elif not protocol.batched and "batch_size" in given:
        raise BadInputError(f"--paper {protocol.name} has no use for --batch-size; leave it out")
    if options.draft_model is not None and not protocol.speculative:
        raise BadInputError(f"--paper {protocol.name} has no use for --draft-model; leave it out")
    return _narrow(options, own)


def _narrow(options: BenchOptions, own: Collection[str]) -> BenchOptions:
    """Drop from the table's own options what does not apply beside those of the command line."""
    kept: dict[str, str | None] = {}
    accepts = [] if options.accept is None else parse_words("--accept", options.accept)
    if "accept" in own:
        greedy = {t == 0 for t in parse_numbers("--temperature", options.temperature)}
        accepts = [accept for accept in accepts if (accept == "greedy") in greedy]
        kept["accept"] = ",".join(accepts) or None
    if "typical" not in accepts:
        kept |= {name: None for name in ("epsilon", "delta") if name in own}
    if "prefixes" in own:
        prefixes = parse_words("--prefixes", options.prefixes)
        if options.max_nodes is not None:
            prefixes = [name for name in prefixes if name != "separate"]
        kept["prefixes"] = "all" if "rejection" in accepts else ",".join(prefixes)
    if "batch_size" in own:
        sizes = [str(size) for size in options.batch_sizes if size <= options.prompts]
        kept["batch_size"] = ",".join(sizes)
    return replace(options, **kept)  # type: ignore[arg-type]


def installed_drafters(model: str) -> tuple[str, ...]:
    """List the model's drafters on this machine, prompt lookup, and "auto" if there is any.

    A folder that was trained here is "trained" if it is the only one: that name takes the first.
    """
    here = [d for d in list_drafters(model) if d.path is not None and d.form != "damaged"]
    trained = [d.name for d in here if d.name == str(d.path)]
    published = [d.name for d in here if d.name not in trained]
    found = (*(trained if len(trained) != 1 else [TRAINED]), *published)
    return (*found, LOOKUP, *((AUTO,) if found else ()))


def _unmeasured(protocol: PaperProtocol, options: BenchOptions) -> PaperRun:
    """Return a table of training logs, or the published figures alone."""
    published = protocol.published
    if protocol.rows is None:
        theirs = vars(published.setting).items()
        here = tuple(Difference(name, value, "not measured") for name, value in theirs)
        return PaperRun(PaperResult(protocol.name, published, (), here), _NOTHING)
    folders: dict[str | None, Path] = {
        name: Path(os.path.expanduser(name)) for name in options.drafters
    }
    logs = {name: read_metrics(folder) for name, folder in folders.items()}
    for name, log in logs.items():
        if not log:
            raise ModelNotFoundError(
                f"{folders[name]} holds no {METRICS}; give the folder of a drafter that was "
                f"trained here"
            )
    measured = (protocol.measured(Evidence(logs=logs)),)
    trained = training_options(folders)
    targets = sorted({str(found["model"]) for found in trained.values() if "model" in found})
    here = (
        Difference("model", published.setting.model, ", ".join(targets) or "not known"),
        Difference("questions", published.setting.questions, "held-out texts of each run"),
    )
    return PaperRun(PaperResult(protocol.name, published, measured, here), _NOTHING)


def _paper(
    protocol: PaperProtocol, evidence: Evidence, result: Result, changed: Sequence[Difference]
) -> PaperResult:
    measured, published = result.protocol, protocol.published
    asked = (
        f"{measured.questions}: {count(measured.asked, 'question')}, "
        f"{count(measured.max_tokens, 'token')}"
    )
    baseline = "our own batches without drafts" if protocol.batched else "mlx-lm's own loop"
    here = differences(published, result.machine, result.models, asked, baseline, changed)
    return PaperResult(protocol.name, published, (protocol.measured(evidence),), here)


def _changed(
    protocol: PaperProtocol, options: BenchOptions, given: Collection[str]
) -> list[Difference]:
    own = dict(protocol.options)
    if protocol.installed:
        own["drafter"] = "all on this machine"
    elsewhere = (*_ELSEWHERE, *(["drafter"] if protocol.drafters else []))
    found = []
    for one in fields(options):
        name, value, default = one.name, getattr(options, one.name), one.default
        if name in given and name not in elsewhere and value != own.get(name, default):
            table = f"without it: {_shown(own[name])}" if name in own else "bench's default"
            found.append(Difference(option_name(name), table, _shown(value)))
    return found


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


@dataclass
class Collected:
    """The callbacks of `run_session`, and what they found; see `Evidence`."""

    inspects: Inspects
    choose_capacity: bool  # whether calls of merged candidates get the size that these have
    activity: Activity
    folders: dict[str | None, Path] = field(default_factory=dict)  # of drafters, by name
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
