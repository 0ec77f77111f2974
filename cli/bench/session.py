"""One run of `bench`, from loading to the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from redrafter_mlx.bench.analyse.result import Protocol, Result, judge
from redrafter_mlx.bench.analyse.summary import of_whole_rounds, summarise
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
from redrafter_mlx.bench.measure.runner import Runner, check_draft_model
from redrafter_mlx.bench.show.tables import shape_words
from redrafter_mlx.cli import options as opt
from redrafter_mlx.cli.bench.options import BenchOptions, Loading
from redrafter_mlx.cli.progress import describe_count, describe_percent, progress_bars
from redrafter_mlx.cli.terminal import INTERRUPTED, Terminal
from redrafter_mlx.cpu.blas import BLAS
from redrafter_mlx.distributed.collectives import seconds_of_exchange
from redrafter_mlx.drafting.names import TRAINED, parse
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.options import EngineOptions
from redrafter_mlx.errors import BadInputError, BusyError, RedrafterError
from redrafter_mlx.loading.drafter import PreparedDrafter, prepare_drafter
from redrafter_mlx.loading.load import draft_with
from redrafter_mlx.loading.target import LoadedTarget, load_target
from redrafter_mlx.runtime.busy_machine import BusyMachine
from redrafter_mlx.runtime.launched import launched_rank

RANDOM = "random"
"""Name of the drafter with untrained weights, which measures the cost of useless drafts."""

_TRIALS = 15
"""Number of times that the exchange between ranks is timed."""


class Outcome(NamedTuple):
    """A result for each length of prompts, the exit status, and all answers."""

    results: Sequence[Result]
    status: int
    answers: Sequence[Answer]


Inspect = Callable[[Mapping[str | None, Redrafter], Sequence[Answer]], None]
"""Callback that inspects the answers of one loading while its models are in memory."""

Prepare = Callable[[Mapping[str | None, Redrafter], Plan, Runner], Plan]
"""Callback that returns the plan to measure, given one loading's models and their first plan."""


def run_session(
    options: BenchOptions, inspect: Inspect | None = None, prepare: Prepare | None = None
) -> Outcome:
    """Measure all loadings in turn; after Ctrl-C or an error the result covers what was finished.

    Raises KeyboardInterrupt or the error if no answer was finished.
    """
    if launched_rank():
        load_drafters(options, options.loadings[0])  # never returns: only rank 0 writes the file
    with answers_file(options.answers) as file:
        return _run(options, file, inspect, prepare)


def _run(
    options: BenchOptions,
    file: AnswersFile | None,
    inspect: Inspect | None,
    prepare: Prepare | None,
) -> Outcome:
    machine, busy = Machine.here(), BusyMachine.here()
    models: list[LoadedModel] = []
    notes: list[str] = []
    answers: list[Answer] = []
    planned: dict[str, Sequence[Method]] = {}
    status = 0
    try:
        for loading in options.loadings:
            drafters = load_drafters(options, loading)
            here = [LoadedModel.of(r, loading.label, name) for name, r in drafters.items()]
            models += here
            notes += drafter_notes(loading, drafters)
            before, plans = len(answers), plans_of(options, loading, drafters, prepare)
            planned[loading.label] = plans[0].methods
            notes += _measure(options, plans, drafters, file, machine, here, answers, busy)
            if inspect is not None:
                inspect(drafters, answers[before:])
            notes += filter(None, [exchange_note(next(iter(drafters.values())))])
            del drafters  # two models at once may not fit
    except (KeyboardInterrupt, RedrafterError) as end:
        if not answers:
            raise
        answers = of_whole_rounds(answers, planned) or answers
        asked = len({(answer.dtype, answer.question_id) for answer in answers})
        status = INTERRUPTED if isinstance(end, KeyboardInterrupt) else 1
        notes.append(end_note(end, options, None if options.batch_sizes else asked))
    baseline = "mlx-lm BatchGenerator" if options.batch_sizes else BASELINE
    results, failed = [], False
    for length in options.prompt_lengths:
        if rows := summarise([a for a in answers if a.prompt_tokens == length]):
            verdict = judge(rows, models)
            failed |= verdict.failed
            shown = (*notes, *verdict.notes, *busy.notes())
            results.append(
                Result(machine, tuple(models), protocol_of(options, length), tuple(rows),
                       status == INTERRUPTED, shown, baseline)
            )  # fmt: skip
    return Outcome(results, status or int(failed), answers)


def protocol_of(options: BenchOptions, prompt_tokens: int | None) -> Protocol:
    """Return the protocol that the options describe."""
    return Protocol(
        options.asked_for, options.prompts, options.max_tokens, options.repeats,
        options.warmup, options.delay, options.seed, options.draft_model, prompt_tokens,
        options.ignore_eos,
    )  # fmt: skip


def drafter_notes(loading: Loading, drafters: Mapping[str | None, Redrafter]) -> list[str]:
    """Return what loading told about the choice of drafters."""
    return [f"{loading.label}: {r.drafter_note}" for r in drafters.values() if r.drafter_note]


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


def load_drafters(options: BenchOptions, loading: Loading) -> dict[str | None, Redrafter]:
    """Load the target with each drafter of the options, by name; a single drafter's key is None."""
    first, *others = [name for name in options.drafters if name != RANDOM] or [TRAINED]
    bits, offline = options.drafter_bits, options.offline
    engine = EngineOptions(max_batch=max([EngineOptions.max_batch, *options.batch_sizes]))
    # Only rank 0 needs the files of drafters.
    named = {} if launched_rank() else {n: prepare_drafter(parse(n), bits) for n in others}
    loaded = opt.load_model(
        opt.ModelOptions(options.model, loading.dtype, loading.quantize, offline, first, bits),
        engine,
        chat_or=None if options.raw else opt.RAW_INSTEAD,
    )
    by_name = {first: loaded} | {
        name: _again(loaded, other, offline) for name, other in named.items()
    }
    if RANDOM in options.drafters:
        untrained = next(filter(None, map(_untrained, by_name.values())), None)
        if untrained is None:
            untrained = _untrained(_again(loaded, prepare_drafter(parse(TRAINED), bits), offline))
        assert untrained is not None, "every form that is trained has weights"
        by_name[RANDOM] = untrained
    found: dict[str | None, Redrafter] = {name: by_name[name] for name in options.drafters}
    for redrafter in found.values():
        if options.ignore_eos:
            redrafter.tokenizer.eos_token_ids = ()  # read by mlx-lm's loops, and by ours
        if redrafter.drafting is None and (options.widths or options.lengths):
            raise BadInputError(
                redrafter.drafter_note
                or "--beam-width and --beam-length need a drafter; there is none"
            )
    return {None: next(iter(found.values()))} if len(found) == 1 else found


def plans_of(
    options: BenchOptions,
    loading: Loading,
    drafters: Mapping[str | None, Redrafter],
    prepare: Prepare | None,
) -> list[Plan]:
    """Return one loading's plan for each length of prompts."""
    first, runner = next(iter(drafters.values())), Runner(drafters)
    methods = options.methods([name for name, r in drafters.items() if r.drafting is not None])
    runner.check(methods, options.max_tokens)
    plans = [options.plan(loading.label, methods, n, first) for n in options.prompt_lengths]
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
) -> list[str]:
    """Append one loading's answers: first those of the file, then the missing ones, measured.

    Returns a note if methods are compared that answered in different runs of this program.
    """
    first, dtype = next(iter(drafters.values())), models[0].dtype
    draft = _load_draft_model(options, first)
    runner = Runner(drafters, None if draft is None else draft.model)
    settings = settings_of(options, machine, models, draft)
    stored = matching(file, dtype, settings) if file else []
    parts = [plan.split(stored) for plan in plans]
    before = [answer for done, _ in parts for answer in done]
    answers += before
    cases = [case for _, missing in parts for case in missing]
    for name in {c.method.drafter for c in cases if c.method.automatic and options.warmup}:
        measure_machine(drafters[name])
    for name in drafters if options.report else ():
        measure_machine(drafters[name])
    total, done = sum(plan.size for plan in plans), sum(plan.size for plan in plans) - len(cases)
    began, resumed, latest = time.monotonic(), done, ""

    def describe(done: int, total: int) -> str:
        """Return such as `37 of 960 · 12 min left · redrafter 2 x 4: 31.4 tok/s`."""
        if done <= resumed:
            return describe_count(done, total)
        left = (time.monotonic() - began) / (done - resumed) * (total - done)
        rest = f"{left / 60:.0f} min left" if left >= 60 else f"{left:.0f} s left"
        return f"{describe_count(done, total)} · {rest}{latest}"

    activity = f"measuring {models[0].model}, {dtype}"
    with progress_bars(activity, describe) as progress, busy.watched():
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
        return []
    return [
        f"{dtype}: to {mixed} questions, methods answered in different runs of this program: "
        f"speedups between those compare the machine at different moments"
    ]


def measure_machine(redrafter: Redrafter) -> None:
    """Measure the cost curves now, so that auto-tuning does not do it between timed answers."""
    if redrafter.tuning is None or redrafter.tuning.measured:
        return
    with progress_bars("measuring this machine", describe_percent) as progress:
        try:
            redrafter.measure(lambda share: progress("calls", int(100 * share), 100))
        except BusyError as error:  # answers go on with assumed costs, and correct them
            Terminal.standard().note(str(error))


def exchange_note(redrafter: Redrafter) -> str | None:
    """Time the exchange between ranks in one call; None unless the ranks share the tensors."""
    mirror, target = redrafter.mirror, redrafter.target
    if mirror is None or mirror.sharing != "tensor":
        return None
    cases = [(rows, command_only) for rows in (1, 8) for command_only in (False, True)]
    with target.lock:
        times = [
            [seconds_of_exchange(mirror, target, *case) for case in cases] for _ in range(_TRIALS)
        ]
    one, command, eight, command_eight = 1000 * np.median(times, axis=0)
    return (
        f"{mirror.ranks.size} ranks: the exchange of a call takes {one:.2f} ms with 1 row and "
        f"{eight:.2f} ms with 8; of these, the command alone takes {command:.2f} and "
        f"{command_eight:.2f} ms"
    )


def settings_of(
    options: BenchOptions,
    machine: Machine,
    models: Sequence[LoadedModel],
    draft: LoadedTarget | None = None,
) -> Settings:
    """Return the settings that new answers must share with those in the answers file.

    Args:
      draft: the model of mlx-lm's speculative decoding
    Returns, among others:
      drafts: all drafters, as `LoadedModel.drafts` describes them
      blas:   file name of the library of matrix products; None for MLX's own
      tf32:   whether float32 products are rounded to TF32
      ranks:  number of processes that share the target
    """
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


def _load_draft_model(options: BenchOptions, loaded: Redrafter) -> LoadedTarget | None:
    """Load the draft model for mlx-lm's speculative decoding; None without `--draft-model`."""
    if options.draft_model is None:
        return None
    with progress_bars(f"loading {options.draft_model}") as progress:
        draft = load_target(options.draft_model, offline=options.offline, progress=progress)
    vocabulary = int(draft.model(mx.array([[0]])).shape[-1])
    check_draft_model(loaded, vocabulary, options.draft_model)
    return draft


def _again(loaded: Redrafter, drafter: PreparedDrafter, offline: bool) -> Redrafter:
    """Return the same target with another drafter, which is downloaded unless `offline`."""
    assert loaded.source is not None, "was loaded by name"
    again = LoadedTarget.of(loaded.model, loaded.tokenizer, loaded.source, loaded.mirror)
    with progress_bars("loading another drafter") as progress:
        return draft_with(
            drafter, again,
            offline=offline, progress=progress, engine=loaded.limits, thread=loaded.thread,
        )  # fmt: skip


def _untrained(loaded: Redrafter) -> Redrafter | None:
    """Return the same target with the drafter untrained; None if it has no untrained form."""
    drafter = None if loaded.drafter is None else loaded.drafter.untrained()
    if drafter is None:
        return None
    redrafter = Redrafter(
        loaded.model, loaded.tokenizer, drafter, source=loaded.source, mirror=loaded.mirror,
        engine=loaded.limits, thread=loaded.thread,
    )  # fmt: skip
    redrafter.warm_up()
    return redrafter
