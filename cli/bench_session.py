"""One `bench`, from loading to the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from redrafter_mlx.bench.breakdown import Breakdown, break_down
from redrafter_mlx.bench.machine import LoadedModel, Machine
from redrafter_mlx.bench.methods import Runner, check_draft_model
from redrafter_mlx.bench.paper import TABLES
from redrafter_mlx.bench.records import Answer, AnswersFile, Settings
from redrafter_mlx.bench.result import Protocol, Result
from redrafter_mlx.bench.run import Plan, measure
from redrafter_mlx.bench.summary import seconds_per_step, summarise
from redrafter_mlx.bench.verdict import judge
from redrafter_mlx.cli import options as opt
from redrafter_mlx.cli.bench_progress import Progress
from redrafter_mlx.cli.bench_request import Loading, Request
from redrafter_mlx.cli.progress import progress_bars
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.generate import Redrafter
from redrafter_mlx.load import load_target

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
            loaded, draft = _load(request, loading)
            models.append(LoadedModel.of(loaded, loading.label))
            if loaded.drafter_note:
                notes.append(f"{loading.label}: {loaded.drafter_note}")
            _measure(request, loaded, draft, file, machine, models[-1], answers, breakdowns)
            del loaded, draft  # two models at once may not fit
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
        paper=TABLES if request.paper else (),
    )  # fmt: skip
    return Outcome(result, INTERRUPTED if interrupted else int(unequal.failed))


def _load(request: Request, loading: Loading) -> tuple[Redrafter, nn.Module | None]:
    """The target with its drafter, and mlx-lm's draft model if one was asked for."""
    loaded = opt.load_model(
        request.model, request.drafter, loading.dtype, loading.quantize, request.offline
    )
    if loaded.proposer is None and (request.widths or request.lengths):
        raise BadInputError(
            loaded.drafter_note or "--beam-width and --beam-length need a drafter; there is none"
        )
    if request.draft_model is None:
        return loaded, None

    with progress_bars(f"loading {request.draft_model}") as progress:
        draft = load_target(request.draft_model, offline=request.offline, progress=progress)
    vocabulary = int(draft.model(mx.array([[0]])).shape[-1])
    check_draft_model(loaded, vocabulary, request.draft_model)
    return loaded, draft.model


def _measure(
    request: Request,
    loaded: Redrafter,
    draft: nn.Module | None,
    file: AnswersFile | None,
    machine: Machine,
    model: LoadedModel,
    answers: list[Answer],
    breakdowns: list[Breakdown],
) -> None:
    """One loading: what the file has already, what is missing, and the breakdown."""

    methods = request.methods(None if loaded.proposer is None else loaded.beam_shape)
    plan = request.plan(model.dtype, methods, loaded)
    runner = Runner(loaded, draft)
    runner.check(methods, request.max_tokens)
    settings = _settings(request, machine, model)
    wanted = {(m, p.question.id, r) for _, p, m, r in plan.order()}
    before = [a for a in (file.matching(model.dtype, settings) if file else ())
              if a.key[1:] in wanted]  # fmt: skip
    answers += before
    progress_of = Progress(plan.size, len(before))
    with progress_bars(f"measuring {model.model}, {model.dtype}", progress_of.describe) as bars:
        for answer in measure(plan, runner, before):
            answers.append(answer)
            if file is not None:
                file.append(answer, settings)
            progress_of.advance(answer)
            if bars is not None:
                bars("answers", progress_of.done, plan.size)
    if request.breakdown and loaded.proposer is not None:
        with progress_bars("measuring the parts of a step"):
            _break_down(loaded, plan, model.dtype, answers, breakdowns)


def _break_down(
    loaded: Redrafter,
    plan: Plan,
    dtype: str,
    answers: Sequence[Answer],
    breakdowns: list[Breakdown],
) -> None:
    """Each drafted shape once; the automatic one as the drafter's own."""

    done = set()
    for method in plan.methods:
        if method.name != "redrafter":
            continue
        shape = method.options(plan.max_tokens, 0).beam_shape(loaded.beam_shape)
        if shape.length > 1 and shape not in done:
            done.add(shape)
            mine = [a for a in answers if a.dtype == dtype and a.method == method]
            # The automatic shape is free to change from step to step.
            timed = [] if method.automatic or method.temperature > 0 else mine
            breakdowns.append(
                break_down(
                    loaded, plan.questions[0].prompt_ids, shape, dtype=dtype,
                    loop=seconds_per_step(timed),
                )
            )  # fmt: skip


def _settings(request: Request, machine: Machine, model: LoadedModel) -> Settings:

    return Settings(
        model=model.model,
        model_hash=model.model_hash,
        drafter_hash=model.drafter_hash,
        draft_model=request.draft_model,
        arithmetic=model.arithmetic,
        bits=model.bits,
        max_tokens=request.max_tokens,
        seed=request.seed,
        chip=machine.chip,
        mlx=machine.mlx,
        mlx_lm=machine.mlx_lm,
    )
