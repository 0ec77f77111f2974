"""Lines that training prints: plan, sizes, corpus, evaluations and the verdict."""

from __future__ import annotations

import shlex
import time

from rich.console import Console
from rich.table import Table

from redrafter_mlx.distill.corpus.folder import CorpusSize, describe_left_out
from redrafter_mlx.distill.evaluation.speed import MeasuredRow, verdict
from redrafter_mlx.distill.hours import MAX_EPOCHS, Deadline
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.distill.plan import RunPlan
from redrafter_mlx.distill.run import WrittenRun
from redrafter_mlx.distill.training.trainer import Evaluation
from redrafter_mlx.drafting.files.installed import own_shelf
from redrafter_mlx.runtime.files.paths import free_disk, human_size
from redrafter_mlx.runtime.words import count


def print_deadline(console: Console, deadline: Deadline) -> None:
    console.print(
        f"{ends_at(deadline.left)} ({deadline.seconds / 3600:g} h), or after {MAX_EPOCHS:g} passes "
        f"over its corpus"
    )


def ends_at(seconds: float) -> str:
    """Return `the run ends at 06:40`, the time that is `seconds` from now."""
    return time.strftime("the run ends at %H:%M", time.localtime(time.time() + seconds))


def print_corpus(run: WrittenRun, console: Console, *, planned: bool) -> None:
    """Print what the corpus holds; `planned`: time bounded it, not the size asked for."""
    corpus, plan = run.size, run.plan
    left = describe_left_out(corpus.left_out) or "nothing"
    console.print(
        f"corpus: {count(corpus.texts, 'text')}, {count(corpus.answer_tokens, 'answer token')}, "
        f"{corpus.read_tokens} tokens read, "
        f"{human_size(corpus.bytes)} in {plan.corpus.folder}; left out: {left}"
    )
    layers = bool(plan.recipe.context_layers)
    note = shortfall(corpus, plan.job, plan.corpus.max_bytes, layers=layers)
    if note and not planned:
        console.print(note)


def shortfall(corpus: CorpusSize, job: TrainingJob, max_bytes: int, *, layers: bool) -> str | None:
    """Explain why a corpus (of `max_bytes` at most) is smaller than requested; None if not."""
    if job.data is not None or corpus.answer_tokens >= job.answer_tokens:
        return None
    tenth = ", a tenth of the free disk," if job.cache_bytes is None else ""
    room = f"cache_bytes {max_bytes}{tenth} holds no more of the {job.answer_tokens} asked for"
    return f"{room}; without context layers it would" if layers else room


def print_quality(console: Console, at: Evaluation) -> None:
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


def print_verdict(job: TrainingJob, rows: list[MeasuredRow]) -> None:
    """Print the timing beside plain decoding, and the command that uses the drafter."""
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
    output = job.output
    use = ["redrafter-mlx", "generate" if job.raw else "chat", job.model]
    if output.resolve().parent != own_shelf().resolve():  # where it needs no name
        use += ["--drafter", str(output.absolute())]  # `-o trained` is no name of a drafter
    if job.raw:
        use += ["--raw", "--prompt", "Once upon a time"]
    console.print(f"use it: {shlex.join(use)}")


def print_sizes(run: RunPlan, *, planned: bool) -> None:
    """Print what a dry run knows, by arithmetic; `planned`: --hours bounds the run instead."""
    console = Console(highlight=False, soft_wrap=True, markup=False)
    known, free = run.sizes(), free_disk(run.corpus.folder)
    share = min(1.0, known.max_bytes / known.corpus_bytes)
    steps = max(1, round(share * known.steps))
    preparing = "reading the answers" if run.job.data else "writing the corpus"
    size = human_size(min(known.corpus_bytes, known.max_bytes))
    if share < 1:
        tenth = " (a tenth of the free disk)" if run.job.cache_bytes is None else ""
        size += (
            f", which holds {share:.0%} of these tokens: cache_bytes is "
            f"{human_size(run.corpus.max_bytes)}{tenth}"
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
        ("time", "not measured: a dry run does not call the model; --hours H bounds it"),
    ):
        console.print(f"{what:<20} {amount}")
    if planned:
        console.print("with --hours, time decides how many answers are written and steps trained")
