"""Repeats the measurement of a paper's table on the given model."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

from redrafter_mlx.bench.analyse.result import Result
from redrafter_mlx.bench.checks import check_measurement
from redrafter_mlx.bench.collected import Collected, training_options
from redrafter_mlx.bench.options import BenchOptions
from redrafter_mlx.bench.papers.evidence import Evidence
from redrafter_mlx.bench.papers.protocols import PaperProtocol
from redrafter_mlx.bench.papers.report import Difference, PaperResult, differences
from redrafter_mlx.bench.session import Hooks, Outcome, run_session
from redrafter_mlx.distill.report.metrics import METRICS, read_metrics
from redrafter_mlx.drafting.files.installed import list_drafters
from redrafter_mlx.drafting.names import AUTO, TRAINED
from redrafter_mlx.drafting.untrained.host_drafters import LOOKUP
from redrafter_mlx.errors import BadInputError, ModelNotFoundError
from redrafter_mlx.runtime.processes.launched import launched_rank
from redrafter_mlx.runtime.ranges import parse_numbers, parse_words
from redrafter_mlx.runtime.words import count, option_name
from redrafter_mlx.weights.registry import DEFAULT_MODEL

_ELSEWHERE = ("answers", "questions", "limit", "model", "offline", "seed")
"""Options that a table shows in other ways, or that change no figure but by chance."""


_NOTHING = Outcome([], False, [])


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

    A folder that was trained here is "trained" if it is the only one; that name takes the first of
    several that can be loaded.
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
    folders: dict[str | None, Path] = {name: _path(name) for name in options.drafters}
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
    protocol: PaperProtocol,
    evidence: Evidence,
    result: Result,
    changed: Sequence[Difference],
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
    """Return the options of the command line that change the measurement."""
    own = dict(protocol.options)
    if protocol.installed:
        own["drafter"] = "all on this machine"
    elsewhere = (*_ELSEWHERE, *(["drafter"] if protocol.drafters else []))
    found = []
    for name in (field.name for field in fields(options)):
        value, default = getattr(options, name), getattr(BenchOptions, name)
        if name in given and name not in elsewhere and value != own.get(name, default):
            table = f"without it: {_shown(own[name])}" if name in own else "bench's default"
            found.append(Difference(option_name(name), table, _shown(value)))
    return found


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _path(name: str) -> Path:
    """Return the path that a drafter's name may be, `~` expanded as in loading."""
    return Path(os.path.expanduser(name))
