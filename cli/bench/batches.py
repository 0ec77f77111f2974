"""`redrafter-mlx bench --batch-size`: batches of requests, with and without drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from redrafter_mlx.bench.analyse.batch_summary import BatchRow, summarise_batches
from redrafter_mlx.bench.analyse.result import Result
from redrafter_mlx.bench.measure.answers import LinesFile, answers_file
from redrafter_mlx.bench.measure.batches import (
    BatchKey,
    BatchMeasurement,
    BatchPlan,
    BatchRun,
    BatchRunner,
    Case,
    read_run,
)
from redrafter_mlx.bench.measure.machine import LoadedModel, Machine
from redrafter_mlx.bench.measure.methods import BASELINE, Method, Runner
from redrafter_mlx.cli.bench.options import BenchOptions, Loading
from redrafter_mlx.cli.bench.session import (
    drafter_notes,
    end_note,
    load_drafters,
    measure_machine,
    protocol_of,
    settings_of,
)
from redrafter_mlx.cli.progress import describe_count, progress_bars
from redrafter_mlx.cli.terminal import INTERRUPTED
from redrafter_mlx.errors import RedrafterError
from redrafter_mlx.runtime.busy_machine import BusyMachine
from redrafter_mlx.runtime.launched import launched_rank

_DIFFER = "our tokens are not those of mlx-lm in float32, where they must be; please report it"


def run_batches(options: BenchOptions) -> tuple[list[tuple[int | None, Result[BatchRow]]], int]:
    """Measure all prompt lengths, batch sizes and methods with one loading.

    Returns a result for each length that prompts are brought to, None leaving them unchanged, and
    the exit status. After Ctrl-C or an error the results cover the rounds that every method has
    finished. Raises KeyboardInterrupt or the error if there is none.
    """
    (loading,) = options.loadings
    if launched_rank():
        load_drafters(options, loading)  # never returns: only rank 0 writes the file
    with answers_file(options.answers, read_run) as file:
        return _run(options, loading, file)


def _run(
    options: BenchOptions, loading: Loading, file: LinesFile[tuple[BatchKey, BatchRun]] | None
) -> tuple[list[tuple[int | None, Result[BatchRow]]], int]:
    drafters = load_drafters(options, loading)
    first = next(iter(drafters.values()))
    methods = options.methods([name for name, r in drafters.items() if r.drafting is not None])
    alone, together = Runner(drafters), BatchRunner(drafters)
    alone.check(methods, options.max_tokens)
    plans = [options.batch_plan(methods, length, first) for length in options.prompt_lengths]
    machine = Machine.here()
    models = [LoadedModel.of(r, loading.label, name) for name, r in drafters.items()]
    settings = settings_of(options, machine, models)
    done = []
    if file is not None:
        for run, stored in file.lines:
            file.check(stored, settings, settings)
            done.append(run)
    parts = [plan.split(done) for plan in plans]
    notes, busy = drafter_notes(loading, drafters), BusyMachine.here()
    ended: KeyboardInterrupt | RedrafterError | None = None
    try:
        todo = [method for _, missing in parts for method, _ in missing]
        for name in dict.fromkeys(method.drafter for method in todo if method.automatic):
            measure_machine(drafters[name])
        total = sum(plan.size for plan in plans)
        with progress_bars("measuring batches", describe_count) as progress, busy.watched():
            for plan, (measured, missing) in zip(plans, parts, strict=True):
                for new in _measure(plan, measured, missing, alone, together):
                    if file is not None:
                        file.append(new.to_dict(settings))
                    progress("runs", sum(len(measured) for measured, _ in parts), total)
    except (KeyboardInterrupt, RedrafterError) as end:
        ended = end
        notes += [end_note(end, options)]
    interrupted = isinstance(ended, KeyboardInterrupt)
    notes += busy.notes()
    results, failed = [], isinstance(ended, RedrafterError)
    exact = all(model.exact for model in models)
    for length, plan, (measured, _) in zip(options.prompt_lengths, plans, parts, strict=True):
        if rows := summarise_batches(plan.complete(measured)):
            differ = exact and any(row.matches_plain is False for row in rows if row.method.ours)
            failed |= differ
            shown = (*notes, *([_DIFFER] if differ else []))
            protocol = protocol_of(options, length)
            result = Result(machine, tuple(models), protocol, tuple(rows), interrupted, shown,
                            "mlx-lm BatchGenerator")  # fmt: skip
            results.append((length, result))
    if ended is not None and not results:
        raise ended
    return results, INTERRUPTED if interrupted else int(failed)


def _measure(
    plan: BatchPlan,
    measured: list[BatchMeasurement],
    missing: Sequence[Case],
    alone: Runner,
    together: BatchRunner,
) -> Iterator[BatchMeasurement]:
    """Append what is missing to what is measured, compared with mlx-lm's loop, and yield it."""
    asked = {
        question.question.id or 0: question
        for method, questions in missing
        if method.temperature == 0
        for question in questions
    }
    plain = {
        key: alone.run(Method(BASELINE), q.prompt_ids, plan.max_tokens, plan.seed).token_ids
        for key, q in asked.items()
    }
    for measurement in together.measure(plan, missing):
        measured.append(measurement.compared(plain))
        yield measured[-1]
