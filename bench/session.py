"""One measurement, from loading to the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from redrafter_mlx.bench.analyse.result import Protocol, Result, judge
from redrafter_mlx.bench.analyse.summary import of_whole_rounds, summarise
from redrafter_mlx.bench.checks import check_measurement
from redrafter_mlx.bench.measure.answers import (
    Answer,
    AnswersFile,
    Settings,
    answers_file,
    matching,
)
from redrafter_mlx.bench.measure.machine import LoadedModel, Machine
from redrafter_mlx.bench.measure.methods import BASELINE, Method
from redrafter_mlx.bench.measure.plan import Plan, measure
from redrafter_mlx.bench.measure.runner import Runner
from redrafter_mlx.bench.models import (
    Load,
    exchange_note,
    load_draft_model,
    load_drafters,
    load_model,
    measure_machine,
)
from redrafter_mlx.bench.options import Activity, BenchOptions, Loading, silent
from redrafter_mlx.bench.show.tables import shape_words
from redrafter_mlx.cpu.blas import BLAS
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import RedrafterError
from redrafter_mlx.loading.target import LoadedTarget
from redrafter_mlx.runtime.busy_machine import BusyMachine
from redrafter_mlx.runtime.processes.launched import launched_rank


class Outcome(NamedTuple):
    """A result for each length of prompts, and all answers."""

    results: Sequence[Result]
    failed: bool  # whether an error ended it, or tokens differ although float32 guarantees equality
    answers: Sequence[Answer]

    @property
    def interrupted(self) -> bool:
        return any(result.interrupted for result in self.results)


Inspect = Callable[[Mapping[str | None, Redrafter], Sequence[Answer]], None]
"""Callback that inspects the answers of one loading while its models are in memory."""

Prepare = Callable[[Mapping[str | None, Redrafter], Plan, Runner], Plan]
"""Callback that returns the plan to measure, given one loading's models and their first plan."""


@dataclass(frozen=True)
class Hooks:
    """What a caller may replace or add: how models are loaded and progress is shown."""

    load: Load = load_model
    activity: Activity = silent
    prepare: Prepare | None = None
    inspect: Inspect | None = None
    profiles: bool = False  # whether costs are measured even for drafters that need none


def run(options: BenchOptions, hooks: Hooks | None = None) -> Result:
    """Measure what the options ask for; after Ctrl-C the result covers what was finished.

    Raises BadInputError for impossible options, and as `run_session` does.
    """
    check_measurement(options)
    (result,) = run_session(options, hooks or Hooks()).results
    return result


def run_session(options: BenchOptions, hooks: Hooks) -> Outcome:
    """Measure all loadings in turn; after Ctrl-C or an error the result covers what was finished.

    Raises KeyboardInterrupt or the error if no answer was finished.
    """
    if launched_rank():  # never returns: only rank 0 writes the file
        load_drafters(options, options.loadings[0], hooks.load, hooks.activity)
    with answers_file(options.answers) as file:
        return _run(options, file, hooks)


def _run(options: BenchOptions, file: AnswersFile | None, hooks: Hooks) -> Outcome:
    machine, busy = Machine.here(), BusyMachine.here()
    models: list[LoadedModel] = []
    notes: list[str] = []
    answers: list[Answer] = []
    planned: dict[str, Sequence[Method]] = {}
    ended: KeyboardInterrupt | RedrafterError | None = None
    try:
        for loading in options.loadings:
            drafters = load_drafters(options, loading, hooks.load, hooks.activity)
            here = [LoadedModel.of(r, loading.label, name) for name, r in drafters.items()]
            models += here
            notes += [f"{loading.label}: {r.drafter_note}" for r in drafters.values()
                      if r.drafter_note]  # fmt: skip
            before, plans = len(answers), plans_of(options, loading, drafters, hooks)
            planned[loading.label] = plans[0].methods
            notes += _measure(options, plans, drafters, file, machine, here, answers, busy, hooks)
            if hooks.inspect is not None:
                hooks.inspect(drafters, answers[before:])
            notes += filter(None, [exchange_note(next(iter(drafters.values())))])
            del drafters  # two models at once may not fit
    except (KeyboardInterrupt, RedrafterError) as end:
        if not answers:
            raise
        answers = of_whole_rounds(answers, planned) or answers
        asked = len({(answer.dtype, answer.question_id) for answer in answers})
        ended = end
        notes.append(end_note(end, options, None if options.batch_sizes else asked))
    baseline = "mlx-lm BatchGenerator" if options.batch_sizes else BASELINE
    results, failed = [], isinstance(ended, RedrafterError)
    for length in options.prompt_lengths:
        if rows := summarise([a for a in answers if a.prompt_tokens == length]):
            verdict = judge(rows, models)
            failed |= verdict.failed
            shown = (*notes, *verdict.notes, *busy.notes())
            results.append(
                Result(machine, tuple(models), protocol_of(options, length), tuple(rows),
                       isinstance(ended, KeyboardInterrupt), shown, baseline)
            )  # fmt: skip
    return Outcome(results, failed, answers)


def protocol_of(options: BenchOptions, prompt_tokens: int | None) -> Protocol:
    return Protocol(
        options.asked_for, options.prompts, options.max_tokens, options.repeats,
        options.warmup, options.delay, options.seed, options.draft_model, prompt_tokens,
        options.ignore_eos,
    )  # fmt: skip


def end_note(
    end: KeyboardInterrupt | RedrafterError, options: BenchOptions, asked: int | None = None
) -> str:
    """Return the note of a result that was cut short after `asked` questions."""
    if isinstance(end, RedrafterError):
        return f"ended by an error: {end}"
    on = f"; the same command resumes where {options.answers} ends" if options.answers else ""
    whole = options.prompts * len(options.loadings)
    count = "" if asked is None else f"{asked} of {whole} " if whole > 1 else ""
    questions = f"{count}questions that all methods have answered"
    return f"interrupted: the figures are of the {questions}{on}"


def plans_of(
    options: BenchOptions, loading: Loading, drafters: Mapping[str | None, Redrafter], hooks: Hooks
) -> list[Plan]:
    """Return one loading's plan for each length of prompts."""
    first, runner = next(iter(drafters.values())), Runner(drafters)
    methods = options.methods([name for name, r in drafters.items() if r.drafting is not None])
    runner.check(methods, options.max_tokens)
    plans = [
        options.plan(loading.label, methods, length, first, hooks.activity)
        for length in options.prompt_lengths
    ]
    prepare = hooks.prepare
    return plans if prepare is None else [prepare(drafters, plan, runner) for plan in plans]


def _measure(
    options: BenchOptions,
    plans: Sequence[Plan],
    drafters: Mapping[str | None, Redrafter],
    file: AnswersFile | None,
    machine: Machine,
    models: Sequence[LoadedModel],
    answers: list[Answer],
    busy: BusyMachine,
    hooks: Hooks,
) -> list[str]:
    """Append a loading's answers, first those of the file, then measured ones; return notes."""
    first, dtype = next(iter(drafters.values())), models[0].dtype
    draft = load_draft_model(options, first, hooks.activity)
    runner = Runner(drafters, None if draft is None else draft.model)
    settings = settings_of(options, machine, models, draft)
    stored = matching(file, dtype, settings) if file else []
    parts = [plan.split(stored) for plan in plans]
    before = [answer for done, _ in parts for answer in done]
    answers += before
    cases = [case for _, missing in parts for case in missing]
    profiled = {c.method.drafter for c in cases if c.method.automatic and options.warmup}
    notes = [
        note
        for name in (drafters if hooks.profiles else profiled)
        for note in measure_machine(drafters[name], hooks.activity)
    ]
    total, done = sum(plan.size for plan in plans), sum(plan.size for plan in plans) - len(cases)
    began, resumed, latest = time.monotonic(), done, ""

    def describe(done: int, total: int) -> str:
        """Return such as `37 of 960 · 12 min left · redrafter 2 x 4: 31.4 tok/s`."""
        if done <= resumed:
            return f"{done} of {total}"
        left = (time.monotonic() - began) / (done - resumed) * (total - done)
        rest = f"{left / 60:.0f} min left" if left >= 60 else f"{left:.0f} s left"
        return f"{done} of {total} · {rest}{latest}"

    activity = f"measuring {models[0].model}, {dtype}"
    with hooks.activity(activity, describe) as progress, busy.watched():
        for plan, (_, missing) in zip(plans, parts, strict=True):
            for new in measure(plan, runner, missing, busy.rest):
                answers += new
                if file is not None:
                    file.append(new, settings)
                method, took = new[0].method, sum(a.run.decode_seconds for a in new)
                if took > 0:
                    name = f"{method.name} {shape_words(method)}".strip()
                    speed = sum(a.run.timed_tokens for a in new) / took
                    latest = f" · {name}: {speed:.1f} tok/s"
                done += 1
                progress("answers", done, total)
    whole = of_whole_rounds(before, {dtype: plans[0].methods})
    mixed = len({answer.round for answer in before} - {answer.round for answer in whole})
    if mixed <= 1:  # an interruption leaves one round unfinished
        return notes
    return [
        *notes,
        f"{dtype}: to {mixed} questions, methods answered in different runs of this program: "
        f"speedups between those compare the machine at different moments",
    ]


def settings_of(
    options: BenchOptions,
    machine: Machine,
    models: Sequence[LoadedModel],
    draft: LoadedTarget | None = None,
) -> Settings:
    """Return the settings that answers in one file share; `draft` is mlx-lm's draft model."""
    model = models[0]
    return {
        "model": model.model,
        "model_hash": model.model_hash,
        "drafts": ", ".join(m.drafts for m in models),
        "draft_model": None if draft is None else f"{draft.source.name} {draft.source.fingerprint}",
        "arithmetic": model.arithmetic,
        "bits": model.bits,
        "max_tokens": options.max_tokens,
        "seed": options.seed,
        "chip": machine.chip,
        "mlx": machine.mlx,
        "mlx_lm": machine.mlx_lm,
        "redrafter_mlx": machine.redrafter_mlx,
        "blas": None if BLAS.library is None else Path(BLAS.library).name,
        "ignore_eos": options.ignore_eos,
        "tf32": model.tf32,
        "ranks": model.ranks,
    }
