"""Runs the stages of training, with their progress on the terminal or in lines."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
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
from rich.table import Column
from rich.text import Text

from redrafter_mlx.cli.progress import Stage, describe_count, progress_bars, progress_lines
from redrafter_mlx.cli.terminal import INTERRUPTED, StopKey, one_line
from redrafter_mlx.cli.train.lines import (
    ends_at,
    print_corpus,
    print_deadline,
    print_quality,
    print_sizes,
    print_verdict,
)
from redrafter_mlx.distill import run as stages
from redrafter_mlx.distill.corpus.folder import CorpusSize, describe_left_out
from redrafter_mlx.distill.hours import Deadline
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.distill.plan import RunPlan, plan
from redrafter_mlx.distill.run import WrittenRun
from redrafter_mlx.distill.training.learner import Step
from redrafter_mlx.distill.training.trainer import Event
from redrafter_mlx.distributed.group import join_ranks
from redrafter_mlx.runtime.files.atomic_write import locked
from redrafter_mlx.runtime.files.paths import human_size
from redrafter_mlx.runtime.words import count

Update = Callable[..., None]
"""Takes the amount that is done, and if known the total and a note."""

Training = Callable[[Callable[[], bool], Callable[[], float]], Iterable[Event]]
"""Stage two of a run: takes `stop` and `passed`, and yields events."""


def run_training(job: TrainingJob, *, dry_run: bool, hours: float | None) -> None:
    """Run all stages of a job, in so many `hours` if given; Ctrl-C leaves it ready to resume."""
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    ranks = join_ranks()
    deadline = None if hours is None else Deadline(job.output, hours)
    if deadline is not None and not dry_run:
        job = deadline.of(job, fixed=ranks is not None)  # the other ranks have their own
    loading = f"looking at {job.model}" if dry_run else f"loading {job.model}"
    with progress_bars(loading) as progress, _lines(console, Stage(loading)):
        run = plan(job, progress, ranks=ranks, dry=dry_run)
    if ranks is not None and not ranks.leads:
        if not dry_run:
            stages.write(run)
        ranks.leave()  # until rank 0 ends
    for line in run.notes:
        console.print(line)
    if dry_run:
        print_sizes(run, planned=hours is not None)
        return
    if deadline is not None:
        print_deadline(console, deadline)
    with _alone_in(run.job.output), _using(run.corpus.folder):
        _train(run, console, deadline)


def _train(planned: RunPlan, console: Console, deadline: Deadline | None) -> None:
    # A finished run, whose time is over as this one begins, is timed with all questions again.
    over = deadline.is_over if deadline is not None and not deadline.is_over() else lambda: False
    with _timed(deadline):
        try:
            run = _write(planned, console, deadline)
        except KeyboardInterrupt:
            _say_goodbye(console, "the corpus so far is kept")
    print_corpus(run, console, planned=deadline is not None)
    with _timed(deadline):
        if deadline is not None:
            deadline.begin_training(run.size.answer_tokens)
        if not fit(partial(stages.fit, run), console, deadline):
            _say_goodbye(console, "the training so far is saved")
        prompts = run.prompts(run.plan.job.timed_questions)
        with stage(console, "timing beside plain decoding", "questions", len(prompts)) as update:
            rows = stages.measure(run.plan, prompts, update, over)
    if note := stages.finish(run, rows):
        console.print(note)
    print_verdict(run.plan.job, rows)


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
def _timed(deadline: Deadline | None) -> Iterator[None]:
    save = (lambda: None) if deadline is None else deadline.save
    save()
    try:
        yield
    finally:
        save()


def _write(run: RunPlan, console: Console, deadline: Deadline | None) -> WrittenRun:
    wanted, began = None if deadline else run.job.answer_tokens, time.monotonic()
    before: int | None = None

    def show(now: CorpusSize) -> None:
        nonlocal before
        written = now.answer_tokens + sum(block.answer_tokens for block in now.started)
        before = written if before is None else before
        rate = max(0, written - before) / max(time.monotonic() - began, 1e-9)
        notes = [count(now.texts, "text"), f"{human_size(now.bytes)} on disk", f"{rate:.0f} tok/s"]
        prompts = sum(block.prompt_tokens for block in now.started if not block.answer_tokens)
        if prompts:
            notes.append(f"{prompts:,} tokens of prompts")
        left_out = sum((block.left_out for block in now.started), Counter(now.left_out))
        if left_out:
            notes.append(f"left out: {describe_left_out(left_out)}")
        if deadline is not None:
            deadline.save_now_and_then()
            notes.append(ends_at(deadline.left))
        update(written if wanted is None else min(written, wanted), note=", ".join(notes))

    with stage(console, "writing the corpus", "tokens", wanted) as update:
        over = deadline.writing_is_over if deadline else lambda: False
        return stages.write(run, show, over, by_time=deadline is not None)


def fit(train: Training, console: Console, deadline: Deadline | None = None) -> bool:
    """Train; return whether training was completed, False if Ctrl-C stopped it."""
    last: Step | None = None
    key = StopKey(answering=True, notice="stopping after this step and saving")

    def stop() -> bool:
        key.closing = key.pressed  # the state is saved next, which another Ctrl-C waits for
        return key.pressed

    with key, stage(console, "training", "steps") as update:
        for event in train(stop, (lambda: 0.0) if deadline is None else deadline.trained):
            if deadline is not None:
                deadline.save_now_and_then()
            if isinstance(event, Step):
                last = event
                note = f"loss {event.loss:.3f}, {event.positions_per_second:.0f} positions/s"
                if deadline is not None:
                    note += f", {ends_at(deadline.left)}"
                update(event.step, event.steps, note)
            else:
                print_quality(console, event)
                key.closing = last is not None and last.step == last.steps  # it is saved next
    return not key.pressed or (last is not None and last.step == last.steps)


def _lines(console: Console, stage: Stage) -> AbstractContextManager[None]:
    """Off a terminal, print the stage's line now and then."""
    if sys.stderr.isatty():
        return nullcontext()
    return progress_lines(stage, lambda line: console.print(one_line(line)))


@contextmanager
def stage(
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
