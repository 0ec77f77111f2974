"""One `bench`, from loading to the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from redrafter_mlx.bench.analyse.result import Protocol, Result, judge
from redrafter_mlx.bench.analyse.summary import commonest_drafted, summarise
from redrafter_mlx.bench.measure.answers import Answer, AnswersFile, Settings
from redrafter_mlx.bench.measure.breakdown import Breakdown, break_down
from redrafter_mlx.bench.measure.machine import LoadedModel, Machine
from redrafter_mlx.bench.measure.methods import Runner
from redrafter_mlx.bench.measure.plan import Plan, measure
from redrafter_mlx.cli.bench_models import load_draft_model, load_drafters
from redrafter_mlx.cli.bench_progress import Progress
from redrafter_mlx.cli.bench_request import Request
from redrafter_mlx.cli.progress import progress_bars
from redrafter_mlx.engine.engine import Redrafter

INTERRUPTED = 130
"""128 + SIGINT."""


class Outcome(NamedTuple):
    """A result and the exit status that it means."""

    result: Result
    status: int


def run_session(request: Request) -> Outcome:
    """Measure every loading in turn; Ctrl-C ends it with what was finished.

    Raises KeyboardInterrupt if nothing was.
    """

    file = None if request.answers is None else AnswersFile(request.answers)
    machine = Machine.here()
    models: list[LoadedModel] = []
    notes: list[str] = []
    answers: list[Answer] = []
    breakdowns: list[Breakdown] = []
    interrupted = False
    try:
        for loading in request.loadings:
            drafters = load_drafters(request, loading)
            here = [LoadedModel.of(r, loading.label, name) for name, r in drafters.items()]
            models += here
            notes += [
                f"{loading.label}: {r.drafter_note}" for r in drafters.values() if r.drafter_note
            ]
            _measure(request, drafters, file, machine, here, answers, breakdowns)
            del drafters  # two models at once may not fit
    except KeyboardInterrupt:
        if not answers:
            raise
        interrupted = True
        on = f"; the same command goes on where {request.answers} ends" if file else ""
        notes.append(f"interrupted: the figures are of what was finished{on}")
    rows = summarise(answers)
    unequal = judge(rows, models)
    result = Result(
        machine=machine,
        models=tuple(models),
        protocol=Protocol(
            request.asked_for, len(request.questions), request.max_tokens, request.repeats,
            request.warmup, request.delay, request.seed, request.draft_model,
        ),
        rows=tuple(rows),
        breakdowns=tuple(breakdowns),
        interrupted=interrupted,
        notes=(*notes, *unequal.notes),
    )  # fmt: skip
    return Outcome(result, INTERRUPTED if interrupted else int(unequal.failed))


def _measure(
    request: Request,
    drafters: Mapping[str | None, Redrafter],
    file: AnswersFile | None,
    machine: Machine,
    models: Sequence[LoadedModel],
    answers: list[Answer],
    breakdowns: list[Breakdown],
) -> None:
    """One loading: what the file has already, what is missing, and the breakdown."""
    first, dtype = next(iter(drafters.values())), models[0].dtype
    methods = request.methods([name for name, r in drafters.items() if r.drafting is not None])
    for name in {m.drafter for m in methods if m.name == "redrafter" and m.automatic}:
        _measure_machine(drafters[name])
    plan = request.plan(dtype, methods, first)
    runner = Runner(drafters, load_draft_model(request, first))
    runner.check(methods, request.max_tokens)
    settings = _settings(request, machine, models)
    wanted = {(m, p.question.id, r) for _, p, m, r in plan.order()}
    before = [a for a in (file.matching(dtype, settings) if file else ())
              if a.key[1:] in wanted]  # fmt: skip
    answers += before
    progress_of = Progress(plan.size, len(before))
    with progress_bars(f"measuring {models[0].model}, {dtype}", progress_of.describe) as bars:
        for answer in measure(plan, runner, before):
            answers.append(answer)
            if file is not None:
                file.append(answer, settings)
            progress_of.advance(answer)
            if bars is not None:
                bars("answers", progress_of.done, plan.size)
    if request.breakdown and any(r.proposer is not None for r in drafters.values()):
        with progress_bars("measuring the parts of a step"):
            _break_down(runner, plan, dtype, answers, breakdowns)


def _measure_machine(redrafter: Redrafter) -> None:
    """Have the cost curves measured before anything is timed, not bit by bit after answers."""
    tuning = redrafter.tuning
    if tuning is not None and not tuning.measured:
        with progress_bars("measuring this machine", lambda done, _: f"{done}%") as bars:
            tuning.measure(lambda share: bars("calls", int(100 * share), 100) if bars else None)


def _break_down(
    runner: Runner,
    plan: Plan,
    dtype: str,
    answers: Sequence[Answer],
    breakdowns: list[Breakdown],
) -> None:
    """Each drafter's shapes once; of the automatic ones, that of most steps."""
    done = set()
    for method in plan.methods:
        if method.name != "redrafter":
            continue
        redrafter = runner.redrafter(method)
        mine = [a for a in answers if a.dtype == dtype and a.method == method]
        shape = redrafter.shape_of(method.options(plan.max_tokens, 0))
        shape = shape or commonest_drafted(mine) or redrafter.beam_shape
        one = method.drafter, shape
        if redrafter.proposer is not None and shape.length > 1 and one not in done:
            done.add(one)
            breakdowns.append(
                break_down(
                    redrafter,
                    plan.questions[0].prompt_ids,
                    shape,
                    dtype=dtype,
                    drafter=method.drafter,
                )
            )


def _settings(request: Request, machine: Machine, models: Sequence[LoadedModel]) -> Settings:
    model = models[0]
    return Settings(
        model=model.model,
        model_hash=model.model_hash,
        drafts=", ".join(m.drafts for m in models),
        draft_model=request.draft_model,
        arithmetic=model.arithmetic,
        bits=model.bits,
        max_tokens=request.max_tokens,
        seed=request.seed,
        chip=machine.chip,
        mlx=machine.mlx,
        mlx_lm=machine.mlx_lm,
    )
