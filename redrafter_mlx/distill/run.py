"""The stages of a training run after its plan: `write`, `fit`, `measure`, `finish`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path

from redrafter_mlx.config import BeamShape
from redrafter_mlx.distill.corpus.examples import (
    Examples,
    count_tokens,
    held_out_blocks,
    hold_out,
    sample_texts,
)
from redrafter_mlx.distill.corpus.filters import EXCLUDED
from redrafter_mlx.distill.corpus.folder import MORE_EMPTY, CorpusGauge, CorpusGoal, CorpusSize
from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.corpus.writing.workers import write_corpus
from redrafter_mlx.distill.evaluation.speed import MeasuredRow, measure_speed
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.distill.options_file import OPTIONS, to_toml
from redrafter_mlx.distill.plan import RunPlan
from redrafter_mlx.distill.report.card import TrainingReport, write_card
from redrafter_mlx.distill.report.metrics import MetricsLog, best_quality, training_seconds
from redrafter_mlx.distill.report.plots import draw_plots
from redrafter_mlx.distill.sizes import check_disk
from redrafter_mlx.distill.training.trainer import Event, Trainer
from redrafter_mlx.drafting.files.forms import DrafterFolder
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.device import chip_name, system_name
from redrafter_mlx.runtime.files.atomic_write import atomic_write

SHAPES = tuple(BeamShape(width, 4) for width in (1, 2, 3, 4))
"""Beam shapes that a drafter is evaluated with."""

TIMED_SHAPES = (BeamShape(1, 2), BeamShape(1, 3), *SHAPES)
"""Beam shapes that a drafter is timed with."""

_TRIED = 30
"""Texts that the target writes, after its own prompts, before a run gives up if none is of use."""


@dataclass(frozen=True)
class WrittenRun:
    """A planned run whose corpus is written, and what the corpus holds."""

    plan: RunPlan
    size: CorpusSize

    @property
    def shards(self) -> list[Path]:
        return [self.plan.corpus.path(block) for block in range(self.size.blocks)]

    @cached_property
    def parts(self) -> tuple[list[Path], list[Text]]:
        """The shards of texts to train on, and held-out texts; errors as of `hold_out`."""
        return hold_out(self.shards, self.plan.source.held_out, self.plan.corpus.extras)

    @property
    def only_read(self) -> list[Path]:
        """The shards of texts that were only read, to train on as well."""
        held_out = self.plan.source.held_out
        # A block that is held out for want of others was read with its own prompts.
        apart = held_out_blocks(self.shards, held_out)
        return [
            read
            for block, shard in enumerate(self.shards)
            if block not in apart or held_out(block)
            for read in self.plan.corpus.extras.read_shards(shard)
        ]

    def sample(self) -> list[Text]:
        """Return some texts that are trained on, a quarter as many tokens as are held out."""
        trained_on, held_out = self.parts
        few = max(1, sum(len(text.answer) for text in held_out) // 4)
        return sample_texts(trained_on, few, self.plan.corpus.extras)

    def prompts(self, count: int) -> list[list[int]]:
        """Return up to `count` held-out prompts, of all lengths."""
        prompts = sorted((text.prompt for text in self.parts[1]), key=len)
        return prompts[:: max(1, len(prompts) // max(1, count))][:count]


def write(
    plan: RunPlan,
    progress: Callable[[CorpusSize], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
    *,
    by_time: bool = False,
) -> WrittenRun:
    """Stage one: write what is missing of the corpus, or less if `stop()`.

    Several ranks write it together. Then rank 0 continues alone, and the others end here. `by_time`
    makes the written corpus the one that was asked for.
    """
    job, corpus = plan.job, plan.corpus
    # Blocks of the target's own prompts are all alike; given ones may be odd.
    own = not plan.given.conversations
    goal = CorpusGoal(
        job.answer_tokens,
        corpus.max_bytes,
        plan.min_blocks,
        max_empty=-(-_TRIED // job.writing.batch) if own else plan.min_blocks + MORE_EMPTY,
        min_tokens=min(job.answer_tokens, 2 * job.training.batch),
        stop=stop,
    )
    if plan.ranks is None or plan.ranks.leads:
        tokenizer = plan.loaded.tokenizer
        check_disk(corpus, goal, plan.recipe, plan.target, tokenizer, plan.source)
    workers = plan.memory.workers
    written = write_corpus(corpus, goal, workers, plan.loaded, progress, plan.ranks)
    if plan.ranks is not None:
        plan.ranks.leave()
    # As the same command will find it again, once it is planned for what was written.
    goal = replace(goal, answer_tokens=written.answer_tokens)
    size = CorpusGauge(corpus, goal).size()
    left_out = Counter(size.left_out) + Counter({EXCLUDED: plan.given.left_out})
    size = replace(size, left_out=left_out)
    goal.check_enough(size, job.data)
    if by_time:
        plan = replace(plan, job=replace(job, answer_tokens=size.answer_tokens))
    return WrittenRun(plan, size)


def fit(
    run: WrittenRun,
    stop: Callable[[], bool] = lambda: False,
    passed: Callable[[], float] = lambda: 0.0,
) -> Iterator[Event]:
    """Stage two: train, starting where an earlier session of this run stopped.

    passed: as in `Trainer.run`; the passes that were made are then those of the options file
    """
    job, trainer = run.plan.job, make_trainer(run)
    with MetricsLog(job.output, trainer.steps_made) as log:
        _write_options(job)
        for event in trainer.run(stop, passed):
            log.append(event)
            yield event
    if passed() >= 1:
        made = round(job.training.epochs * trainer.steps_made / trainer.steps, 2)
        _write_options(replace(job, training=replace(job.training, epochs=made or 0.01)))


def make_trainer(run: WrittenRun) -> Trainer:
    """Return the training of the drafter on the written corpus, at its last checkpoint."""
    plan = run.plan
    job, options, target, extras = plan.job, plan.job.training, plan.target, plan.corpus.extras
    trained_on, held_out = run.parts
    first = next((texts for path in trained_on if (texts := extras.load(path))), [])
    if not first:
        raise BadInputError("the corpus holds no text to train on; write more of it")
    counts = partial(count_tokens, tuple(trained_on), target.vocab_size)
    if job.start_from is None:
        drafter = plan.recipe.fresh(target, counts(), first, options.seed)
    else:
        drafter = plan.recipe.start(job.start_from, target, counts)
    job.output.mkdir(parents=True, exist_ok=True)
    student = plan.recipe.student(drafter, target, options)
    examples = Examples((*trained_on, *run.only_read), extras.each, options, plan.states)
    return Trainer(
        student,
        examples,
        held_out,
        options.steps(student.batches(examples)),
        plan.shapes(SHAPES),
        job.output,
        {**plan.made_by, "blocks": run.size.blocks},
        run.sample(),
    )


def measure(
    plan: RunPlan,
    prompts: Sequence[list[int]],
    done: Callable[[int], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
) -> list[MeasuredRow]:
    """Stage three: time the best drafter and plain decoding, until `stop()` or on all prompts."""
    loaded = plan.loaded
    trained = DrafterFolder(plan.job.output, loaded.source)
    redrafter = Redrafter(loaded.model, loaded.tokenizer, trained, source=loaded.source)
    return measure_speed(redrafter, [*prompts], plan.shapes(TIMED_SHAPES), done, stop)


def finish(run: WrittenRun, measured: Sequence[MeasuredRow]) -> str | None:
    """Stage four: write the plots and the model card; return a line on what is not drawn."""
    plan, output = run.plan, run.plan.job.output
    note = draw_plots(output)
    report = TrainingReport(
        target=plan.loaded.source,
        job=plan.job,
        versions={name: version(name) for name in ("mlx", "mlx-lm", "redrafter-mlx")},
        machine=f"{chip_name()}, {system_name()}",
        corpus=run.size,
        recipe=plan.recipe,
        seconds=training_seconds(output),
        quality=best_quality(output),
        measured=measured,
        started_from=plan.started_from,
    )
    write_card(report, output)
    return note


def _write_options(job: TrainingJob) -> None:
    with atomic_write(job.output / OPTIONS) as written:
        written.write_text(to_toml(job), encoding="utf-8")
