"""`redrafter-mlx bench --paper`: repeat the measurement of a paper's table on the given model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from redrafter_mlx.bench.analyse.batch_summary import BatchResult
from redrafter_mlx.bench.analyse.result import Result
from redrafter_mlx.bench.measure.answers import Answer
from redrafter_mlx.bench.measure.likelihood import Likelihood, likelihood
from redrafter_mlx.bench.papers.evidence import AnswerKey, Evidence
from redrafter_mlx.bench.papers.protocols import PaperProtocol, find_protocol
from redrafter_mlx.bench.papers.report import Difference, PaperResult, differences
from redrafter_mlx.cli.bench.batches import run_batches
from redrafter_mlx.cli.bench.options import BenchOptions
from redrafter_mlx.cli.bench.session import measure_machine, run_session
from redrafter_mlx.cli.progress import progress_bars
from redrafter_mlx.cli.ranges import parse_integers
from redrafter_mlx.distill.options_file import OPTIONS, read_options
from redrafter_mlx.distill.report.metrics import METRICS, read_metrics
from redrafter_mlx.drafting.installed import list_drafters
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import BadInputError, ModelNotFoundError
from redrafter_mlx.runtime.launched import launched_rank

_DEFAULT_MODEL = "smollm2-135m"


class PaperRun(NamedTuple):
    """A table, the results that it was computed from, and the exit status."""

    paper: PaperResult
    results: Sequence[Result | BatchResult]
    status: int


def run_paper(asked: BenchOptions, given: Collection[str]) -> PaperRun:
    """Measure a table; `given` names the options of the command line, which override the table's.

    Raises BadInputError for an option that the table does not use.
    """
    protocol = find_protocol(asked.paper or "")
    options = fill(protocol, asked, given)
    changed = _changed(protocol, options, given)
    if protocol.measures == "logs":
        return _read_logs(protocol, options)
    if protocol.measures == "batches":
        return _measure_batches(protocol, options, changed)
    if options.plot is not None and len(options.widths) * len(options.lengths) < 2:
        raise BadInputError(f"--paper {protocol.name} has one beam shape; leave out --plot")
    options.check()
    if protocol.inspects == "draft costs" and len(options.drafters) > 1:
        raise BadInputError(f"--paper {protocol.name} is of one drafter; give one --drafter")
    if protocol.inspects is not None and launched_rank() is not None:
        raise BadInputError(
            f"--paper {protocol.name} looks at the model in one process; run it without mlx.launch"
        )
    inspector = _Inspector(protocol)
    outcome = run_session(options, inspector.look)
    evidence = Evidence(
        rows=outcome.result.rows,
        answers=outcome.answers,
        likelihoods=inspector.likelihoods,
        draft_costs=inspector.draft_costs,
        options=_training_options(options.drafters),
    )
    paper = _paper(protocol, evidence, outcome.result, changed)
    return PaperRun(paper, [outcome.result], outcome.status)


def fill(protocol: PaperProtocol, asked: BenchOptions, given: Collection[str]) -> BenchOptions:
    """Return the options, with the table's own values for those that the command line omits."""
    own = {name: value for name, value in protocol.options.items() if name not in given}
    if "questions" in given:
        own.pop("mt_bench", None)
    if protocol.installed and "drafter" not in given:
        own["drafter"] = installed_drafters(asked.model or _DEFAULT_MODEL)
    options = replace(asked, **own)  # type: ignore[arg-type]
    if protocol.question is not None and not {"questions", "mt_bench"} & {*given}:
        options = replace(options, only=(protocol.question,))
    if len(options.drafter) < protocol.drafters:
        number = "--drafter" if protocol.drafters == 1 else f"{protocol.drafters} times --drafter"
        raise BadInputError(f"--paper {protocol.name} compares drafters by name; give {number}")
    kind = protocol.measures
    if kind != "batches" and "batch_size" in given:
        raise BadInputError(f"--paper {protocol.name} has no use for --batch-size; leave it out")
    if kind == "logs" and (more := sorted({*given} - {"paper", "drafter", "output"})):
        name = more[0].replace("_", "-")
        raise BadInputError(f"--paper {protocol.name} measures nothing; leave out --{name}")
    return options


def installed_drafters(model: str) -> tuple[str, ...]:
    """List the model's drafters on this machine, prompt lookup, and "auto" if there is any."""
    here = [drafter for drafter in list_drafters(model) if drafter.path is not None]
    found = [drafter.name for drafter in here]
    if here and here[0].name == str(here[0].path):
        found[0] = "trained"  # the first is a folder that was trained here
    return (*found, "lookup", *(("auto",) if found else ()))


class _Inspector:
    """Collects untimed measurements while the models are in memory: likelihoods or draft costs."""

    def __init__(self, protocol: PaperProtocol) -> None:
        self._inspects = protocol.inspects
        self.likelihoods: dict[AnswerKey, Likelihood] = {}
        self.draft_costs: dict[str, float] = {}

    def look(
        self, drafters: Mapping[str | None, Redrafter], answers: Sequence[Answer]
    ) -> None:  # fmt: skip
        first = next(iter(drafters.values()))
        if self._inspects == "likelihoods":
            with progress_bars("reading the answers") as bars:
                for n, answer in enumerate(answers, 1):
                    found = likelihood(first, answer.prompt_ids, answer.run.token_ids)
                    if found is not None:
                        self.likelihoods[answer.key] = found
                    if bars is not None:
                        bars("answers", n, len(answers))
        if self._inspects == "draft costs" and answers and first.tuning is not None:
            measure_machine(first)
            costs = first.tuning.costs
            drafts = 4
            level = costs.drafting(1, drafts + 1) / drafts
            self.draft_costs[answers[0].dtype] = level / costs.verify(1, costs.short_context)


def _measure_batches(
    protocol: PaperProtocol, options: BenchOptions, changed: Sequence[Difference]
) -> PaperRun:
    lengths: list[int | None] = list(protocol.prompt_lengths) or [None]
    if options.prompt_tokens is not None:
        lengths = [*parse_integers("--prompt-tokens", options.prompt_tokens)]
    runs = [
        (n, replace(options, prompt_tokens=None if n is None else str(n))) for n in lengths
    ]  # fmt: skip
    for _, each in runs:
        each.check()
        each.check_batches()
    results = [(n, run_batches(each)) for n, each in runs]
    evidence = Evidence(batches=[(n, row) for n, result in results for row in result.rows])
    paper = _paper(protocol, evidence, results[0][1], changed)
    failed = any(result.failed for _, result in results)
    return PaperRun(paper, [result for _, result in results], int(failed))


def _read_logs(protocol: PaperProtocol, options: BenchOptions) -> PaperRun:
    logs = {}
    for name in options.drafters:
        folder = Path(name)
        log = read_metrics(folder)
        if not log:
            raise ModelNotFoundError(
                f"{folder} holds no {METRICS}; give the folder of a drafter that was trained here"
            )
        logs[folder] = log
    published = protocol.published
    measured = tuple(protocol.tables(Evidence(logs=logs)))
    trained = _training_options(options.drafters)
    targets = sorted({str(found["model"]) for found in trained.values() if "model" in found})
    here = (
        Difference("model", published.setting.model, ", ".join(targets) or "not known"),
        Difference("questions", published.setting.questions, "held-out texts of each run"),
    )
    return PaperRun(PaperResult(protocol.name, published, measured, here), [], 0)


def _paper(
    protocol: PaperProtocol,
    evidence: Evidence,
    result: Result | BatchResult,
    changed: Sequence[Difference],
) -> PaperResult:
    measured = result.protocol
    asked = f"{measured.questions}: {measured.asked}, {measured.max_tokens} tokens"
    published = protocol.published
    alone = isinstance(result, Result)
    baseline = "mlx-lm's own loop" if alone else "our own batches without drafts"
    return PaperResult(
        protocol.name,
        published,
        tuple(protocol.tables(evidence)),
        differences(published, result.machine, result.models, asked, baseline, changed),
    )


def _changed(
    protocol: PaperProtocol, options: BenchOptions, given: Collection[str]
) -> list[Difference]:
    """Return the table's options that the command line overrides."""
    own = dict(protocol.options)
    if protocol.prompt_lengths:
        own["prompt_tokens"] = ",".join(map(str, protocol.prompt_lengths))
    return [
        Difference(
            f"--{name.replace('_', '-')}",
            f"without it: {_shown(value)}",
            _shown(getattr(options, name)),
        )
        for name, value in own.items()
        if name in given and getattr(options, name) != value
    ]


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _training_options(names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Read the training options in the drafters' folders, by drafter name."""
    paths = {name: Path(name) / OPTIONS for name in names}
    return {name: read_options(path) for name, path in paths.items() if path.is_file()}
