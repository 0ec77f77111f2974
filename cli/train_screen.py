"""Terminal output of training: the corpus, the losses, and the verdict."""

from __future__ import annotations

import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

import typer
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

from redrafter_mlx.cli.progress import (
    Stage,
    describe_count,
    duration,
    progress_bars,
    progress_lines,
)
from redrafter_mlx.cli.terminal import INTERRUPTED, StopKey, one_line
from redrafter_mlx.distill.corpus.folder import CorpusSize, describe_left_out
from redrafter_mlx.distill.evaluation.speed import MeasuredRow, verdict
from redrafter_mlx.distill.hours import Schedule
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.distill.run import TrainingRun
from redrafter_mlx.distill.training.trainer import Evaluation, Step
from redrafter_mlx.distributed.group import join_ranks
from redrafter_mlx.drafting.installed import own_shelf
from redrafter_mlx.runtime.atomic_write import locked
from redrafter_mlx.runtime.paths import free_disk, human_size

Update = Callable[..., None]
"""Takes the amount that is done, and if known the total and a note."""


def run_training(job: TrainingJob, *, dry_run: bool, hours: float | None) -> None:
    """Run all stages of a job; Ctrl-C leaves it ready to resume.

    hours: time for which the corpus, the passes over it and the evaluations are planned
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    schedule = None if hours is None else Schedule(job.output, hours)
    if schedule is not None and schedule.plan is not None:
        job = schedule.plan.of(job)
    loading = f"looking at {job.model}" if dry_run else f"loading {job.model}"
    ranks = join_ranks()
    with progress_bars(loading) as progress, _lines(console, Stage(loading)):
        run = TrainingRun(job, progress, ranks=ranks, dry=dry_run)
    if ranks is not None and not ranks.leads:
        if not dry_run:
            run.write()
        ranks.leave()  # until rank 0 ends
    for line in run.notes:
        console.print(line)
    if dry_run:
        _print_sizes(run, planned=hours is not None and (schedule is None or schedule.plan is None))
        return
    if schedule is not None:
        with _stage(console, "planning from a little of both stages"):
            run.begin(schedule)
        _print_plan(console, run, schedule)
    with _alone_in(run.job.output), _using(run.folder):
        _train(run, console, schedule)


def _train(run: TrainingRun, console: Console, schedule: Schedule | None) -> None:
    """Run all stages from the corpus on."""
    # A finished run, whose time is over as this one begins, is timed with all questions again.
    over = schedule.is_over if schedule is not None and not schedule.is_over() else lambda: False
    with _timed(schedule):
        try:
            corpus = _write(run, console, schedule)
        except KeyboardInterrupt:
            _say_goodbye(console, "the corpus so far is kept")
    _print_corpus(corpus, run, console, planned=schedule is not None)
    with _timed(schedule):
        if schedule is not None:
            before = schedule.plan
            with _stage(console, "trying a little of training"):
                run.finalize(schedule)
            schedule.save()
            if schedule.plan != before:
                _print_plan(console, run, schedule)
        if not _fit(run, console, schedule):
            _say_goodbye(console, "the training so far is saved")
        prompts = run.measured_prompts()
        with _stage(console, "timing beside plain decoding", "questions", len(prompts)) as update:
            rows = run.measure(prompts, update, over)
    if note := run.finish(rows):
        console.print(note)
    _print_verdict(run, rows)


@contextmanager
def _alone_in(output: Path) -> Iterator[None]:
    """Keep other runs from training in a folder; raises BadInputError if one does so already."""
    made = not output.exists()
    output.mkdir(parents=True, exist_ok=True)
    taken = f"another run is training in {output}; wait for it, or give another --output"
    with locked(output, taken):
        try:
            yield
        finally:
            if made and not any(output.iterdir()):  # it wrote nothing
                output.rmdir()


@contextmanager
def _using(corpus: Path) -> Iterator[None]:
    """Keep a corpus from being removed; other runs may use it too."""
    corpus.mkdir(parents=True, exist_ok=True)
    with locked(corpus, f"{corpus} is being removed; run the same command again", shared=True):
        try:
            yield
        finally:
            with suppress(OSError):  # unless it wrote nothing
                corpus.rmdir()


def _say_goodbye(console: Console, kept: str) -> None:
    console.print(f"stopped; {kept}, and the same command resumes")
    raise typer.Exit(INTERRUPTED)


@contextmanager
def _timed(schedule: Schedule | None) -> Iterator[None]:
    """Save the plan and the time spent before a stage, and after it, however it ends."""
    save = (lambda: None) if schedule is None else schedule.save
    save()
    try:
        yield
    finally:
        save()


def _print_plan(console: Console, run: TrainingRun, schedule: Schedule) -> None:
    job, seconds = run.job, schedule.to_go()
    console.print(
        f"plan for {schedule.plan.hours if schedule.plan else 0:g} h: {job.answer_tokens:,} answer "
        f"tokens, {job.training.epochs:g} passes, {job.training.evaluations} evaluations, "
        f"{job.timed_questions} timed questions; {_ends(seconds)}, in {duration(seconds)}"
    )


def _ends(seconds: float) -> str:
    """Return `the run ends at 06:40`, the time that is `seconds` from now."""
    return time.strftime("the run ends at %H:%M", time.localtime(time.time() + seconds))


def _write(run: TrainingRun, console: Console, schedule: Schedule | None) -> CorpusSize:
    wanted, began = run.job.answer_tokens, time.monotonic()
    before: int | None = None

    def show(now: CorpusSize) -> None:
        nonlocal before
        written = now.answer_tokens + sum(block.answer_tokens for block in now.started)
        before = written if before is None else before
        rate = max(0, written - before) / max(time.monotonic() - began, 1e-9)
        notes = [f"{now.texts} texts", f"{human_size(now.bytes)} on disk", f"{rate:.0f} tok/s"]
        prompts = sum(block.prompt_tokens for block in now.started if not block.answer_tokens)
        if prompts:
            notes.append(f"{prompts:,} tokens of prompts")
        left_out = sum((block.left_out for block in now.started), Counter(now.left_out))
        if left_out:
            notes.append(f"left out: {describe_left_out(left_out)}")
        if schedule is not None:
            schedule.save_now_and_then()
            notes.append(_ends(schedule.to_go()))
        update(min(written, wanted), note=", ".join(notes))

    with _stage(console, "writing the corpus", "tokens", wanted) as update:
        return run.write(show, schedule.writing_is_over if schedule else lambda: False)


def _print_corpus(corpus: CorpusSize, run: TrainingRun, console: Console, *, planned: bool) -> None:
    left = describe_left_out(corpus.left_out) or "nothing"
    console.print(
        f"corpus: {corpus.texts} texts, {corpus.answer_tokens} answer tokens, "
        f"{corpus.read_tokens} tokens read, "
        f"{human_size(corpus.bytes)} in {run.folder}; left out: {left}"
    )
    note = shortfall(
        corpus, run.job, run.corpus_job.max_bytes, layers=bool(run.recipe.context_layers)
    )
    if note and not planned:
        console.print(note)


def shortfall(corpus: CorpusSize, job: TrainingJob, max_bytes: int, *, layers: bool) -> str | None:
    """Explain why a corpus that the target writes is smaller than requested; None if it is not.

    max_bytes: its maximum size on disk
    layers: whether the inputs of context layers are kept
    """
    if job.data is not None or corpus.answer_tokens >= job.answer_tokens:
        return None
    tenth = ", a tenth of the free disk," if job.cache_bytes is None else ""
    room = f"cache_bytes {max_bytes}{tenth} holds no more of the {job.answer_tokens} asked for"
    return f"{room}; without context layers it would" if layers else room


def _fit(run: TrainingRun, console: Console, schedule: Schedule | None = None) -> bool:
    """Train; return whether training was completed, False if Ctrl-C stopped it."""
    last: Step | None = None
    if schedule is not None:
        schedule.trained()
    key = StopKey(answering=True, notice="stopping after this step and saving")

    def stop() -> bool:
        key.closing = key.pressed  # the state is saved next, which another Ctrl-C waits for
        return key.pressed

    with key, _stage(console, "training", "steps") as update:
        for event in run.fit(stop):
            if schedule is not None:
                schedule.trained(event)
                schedule.save_now_and_then()
            if isinstance(event, Step):
                last = event
                note = f"loss {event.loss:.3f}, {event.positions_per_second:.0f} positions/s"
                if schedule is not None:
                    note += f", {_ends(schedule.to_go(event.step, event.steps))}"
                update(event.step, event.steps, note)
            else:
                _print_quality(console, event)
                key.closing = last is not None and last.step == last.steps  # it is saved next
    return not key.pressed or (last is not None and last.step == last.steps)


def _print_quality(console: Console, at: Evaluation) -> None:
    """Print an evaluation in a line.

    `step 90: first guesses right 43% 32%; tokens/step 1.61 1.90 with beam width 1, 4; saved`
    """
    right = " ".join(f"{share:.0%}" for share in at.quality.top1)
    per_step = " ".join(f"{x:.2f}" for x in at.quality.tokens_per_step.values())
    widths = ", ".join(map(str, at.quality.tokens_per_step))
    console.print(
        f"step {at.step}: first guesses right {right}; tokens/step {per_step} with beam width "
        f"{widths}{'; saved' if at.best else ''}"
    )


def _print_verdict(run: TrainingRun, rows: list[MeasuredRow]) -> None:
    console = Console(highlight=False, soft_wrap=True, markup=False)
    if rows:
        table = Table("width", "length", "nodes", "tokens/step", "tok/s", "plain tok/s", "speedup")
        for row in rows:
            table.add_row(
                *map(str, (row.beam_width, row.beam_length, row.nodes)),
                f"{row.tokens_per_step:.2f}",
                f"{row.tokens_per_second:.1f}",
                f"{row.baseline_tokens_per_second:.1f}",
                f"{row.speedup:.2f}x",
            )
        console.print(table)
    console.print(verdict(rows))
    output = run.job.output
    use = ["redrafter-mlx", "generate" if run.job.raw else "chat", run.job.model]
    if output.resolve().parent != own_shelf().resolve():  # where it needs no name
        use += ["--drafter", str(output.absolute())]  # `-o trained` is no name of a drafter
    if run.job.raw:
        use += ["--raw", "--prompt", "Once upon a time"]
    console.print(f"use it: {shlex.join(use)}")


def _print_sizes(run: TrainingRun, *, planned: bool) -> None:
    """Print what a dry run knows, by arithmetic, and what it cannot know.

    planned: whether --hours will plan the sizes by a trial
    """
    console = Console(highlight=False, soft_wrap=True, markup=False)
    known, free = run.sizes(), free_disk(run.folder)
    share = min(1.0, known.most_bytes / known.corpus_bytes)
    steps = max(1, round(share * known.steps))
    preparing = "reading the answers" if run.job.data else "writing the corpus"
    size = human_size(min(known.corpus_bytes, known.most_bytes))
    if share < 1:
        tenth = " (a tenth of the free disk)" if run.job.cache_bytes is None else ""
        size += (
            f", which holds {share:.0%} of these tokens: cache_bytes is "
            f"{human_size(run.corpus_job.max_bytes)}{tenth}"
        )
    for what, amount in (
        ("answers", f"{known.answer_tokens:,} tokens"),
        ("drafter", f"{known.parameters / 1e6:.1f} million parameters"),
        ("on disk", human_size(known.drafter_bytes)),
        ("corpus on disk", f"{size}; {human_size(free)} are free"),
        ("checkpoints", f"{human_size(known.training_bytes)} on disk, beside the corpus"),
        ("memory", human_size(known.memory_bytes)),
        (preparing, f"by {known.workers} process{'es' if known.workers > 1 else ''}"),
        ("training", f"{steps:,} steps"),
        ("time", "not measured: a dry run does not call the model; --hours H plans it"),
    ):
        console.print(f"{what:<20} {amount}")
    if planned:
        console.print("with --hours, a trial at the start of the run plans answers and steps anew")


def _lines(console: Console, stage: Stage) -> AbstractContextManager[None]:
    """Off a terminal, print the stage's line now and then."""
    if sys.stderr.isatty():
        return nullcontext()
    return progress_lines(stage, lambda line: console.print(one_line(line)))


@contextmanager
def _stage(
    console: Console, activity: str, unit: str = "", total: int | None = None
) -> Iterator[Update]:
    """Show the progress of a stage: a line now and then; on a terminal a live one."""
    stage = Stage(activity, unit, total)
    if not unit or not sys.stderr.isatty():
        with progress_bars(activity, describe_count), _lines(console, stage):
            yield stage.update
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(16),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),  # the bar alone may shrink
        TextColumn(f"{unit},"),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
        TextColumn("left"),
    )
    with _NotedProgress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(activity, total=total)

        def update(done: int, total: int | None = None, note: str = "") -> None:
            progress.note = note
            progress.update(task, completed=done, total=total)

        yield update


class _NotedProgress(Progress):
    """Progress with a note in a line of its own, since both do not fit into 80 columns."""

    note = ""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield from super().get_renderables()
        yield Text(f"  {self.note}", no_wrap=True, overflow="ellipsis")
