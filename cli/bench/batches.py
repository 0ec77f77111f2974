"""`redrafter-mlx bench --batch-size`: batches of requests, with and without drafts."""

from __future__ import annotations

from redrafter_mlx.bench.analyse.batch_summary import BatchResult, summarise_batches
from redrafter_mlx.bench.measure.answers import LinesFile
from redrafter_mlx.bench.measure.batches import BatchRunner, read_run
from redrafter_mlx.bench.measure.machine import LoadedModel, Machine
from redrafter_mlx.bench.measure.methods import BASELINE, Method, Runner
from redrafter_mlx.cli.bench.options import BenchOptions
from redrafter_mlx.cli.bench.session import (
    load_drafters,
    measure_machine,
    protocol_of,
    settings_of,
)
from redrafter_mlx.cli.progress import progress_bars


def run_batches(options: BenchOptions) -> BatchResult:
    """Measure all batch sizes and methods with one loading."""
    (loading,) = options.loadings
    drafters = load_drafters(options, loading)
    drafting = {name: r for name, r in drafters.items() if r.drafting is not None}
    methods = options.methods([*drafting])
    for redrafter in drafting.values():
        measure_machine(redrafter, max(options.batch_sizes))
    alone = Runner(drafters)
    alone.check(methods, options.max_tokens)
    first = next(iter(drafters.values()))
    plan = options.batch_plan(methods, first)
    machine = Machine.here()
    models = [LoadedModel.of(r, loading.label, name) for name, r in drafters.items()]
    settings = settings_of(options, machine, models)
    file, done = None, []
    if options.answers is not None:
        file = LinesFile(options.answers, read_run)
        for run, stored in file.lines:
            file.check(stored, settings, [*vars(settings)])
            done.append(run)
    measured, missing = plan.split(done)
    with progress_bars("measuring batches", lambda done, total: f"{done} of {total:.0f}") as bars:
        plain = {
            q.question.id or 0: alone.run(
                Method(BASELINE), q.prompt_ids, plan.max_tokens, plan.seed
            ).token_ids
            for q in plan.questions
        }
        for measurement in BatchRunner(drafters).measure(plan, missing):
            measured.append(measurement)
            if file is not None:
                file.append(measurement.to_dict(settings))
            if bars is not None:
                bars("runs", len(measured), plan.size)
    return BatchResult(
        machine=machine,
        models=tuple(models),
        protocol=protocol_of(options),
        rows=tuple(summarise_batches(measured, plain)),
    )
