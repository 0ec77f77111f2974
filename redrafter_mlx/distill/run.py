"""A whole training run: corpus, training, timing, report."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from redrafter_mlx.config import BeamShape
from redrafter_mlx.distill.corpus.batch_cache import batch_cache
from redrafter_mlx.distill.corpus.examples import Examples, count_tokens, hold_out
from redrafter_mlx.distill.corpus.filters import EXCLUDED
from redrafter_mlx.distill.corpus.folder import CorpusGauge, CorpusGoal, CorpusJob, CorpusSize
from redrafter_mlx.distill.corpus.prompts.given_texts import corpus_key, read_given
from redrafter_mlx.distill.corpus.read_texts import ReadTexts
from redrafter_mlx.distill.corpus.reader import Reader
from redrafter_mlx.distill.corpus.shards import summarise_shard
from redrafter_mlx.distill.corpus.workers import write_corpus
from redrafter_mlx.distill.corpus.writer import told_to_think
from redrafter_mlx.distill.estimate import Estimate, estimate, plain_seconds, stored_bytes
from redrafter_mlx.distill.evaluation.speed import TIMED_TOKENS, MeasuredRow, measure_speed
from redrafter_mlx.distill.forms.form import weights_digest
from redrafter_mlx.distill.forms.registry import recipe_for
from redrafter_mlx.distill.hours import PLANNED_EPOCHS, BlockSize, Pace, Schedule
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.distill.memory_plan import MemoryPlan, plan_memory
from redrafter_mlx.distill.options_file import OPTIONS, to_toml
from redrafter_mlx.distill.preflight import check_memory, check_output, least_blocks
from redrafter_mlx.distill.report.card import TrainingReport, write_card
from redrafter_mlx.distill.report.metrics import MetricsLog, best_quality, read_metrics
from redrafter_mlx.distill.report.plots import draw_plots
from redrafter_mlx.distill.training.checkpoint import check_same_run, load_checkpoint
from redrafter_mlx.distill.training.trainer import Event, Trainer
from redrafter_mlx.distributed.facts import facts_of
from redrafter_mlx.distributed.group import Ranks
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.loading.target import LoadedTarget, load_target
from redrafter_mlx.runtime.atomic_write import atomic_write
from redrafter_mlx.runtime.device import chip_name, system_name
from redrafter_mlx.runtime.paths import NoRoomError, cache_dir, check_free_disk
from redrafter_mlx.target.fingerprint import nbytes_of
from redrafter_mlx.target.model import Target
from redrafter_mlx.target.tree_check import check_trees
from redrafter_mlx.weights import Progress
from redrafter_mlx.weights.files.folder import contents_of
from redrafter_mlx.weights.fit.machine import this_machine

SHAPES = tuple(BeamShape(width, 4) for width in (1, 2, 3, 4))
"""Beam shapes that a drafter is evaluated with."""

TIMED_SHAPES = (BeamShape(1, 2), BeamShape(1, 3), *SHAPES)
"""Beam shapes that a drafter is timed with."""

_TRIED_STEPS = 3


class TrainingRun:
    """A job with its target in memory, stage by stage: `write`, `fit`, `finish`."""

    job: TrainingJob
    corpus_key: str

    def __init__(
        self,
        job: TrainingJob,
        progress: Progress | None = None,
        loaded: LoadedTarget | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Raises RedrafterError, in one line, for prompts or a target that cannot be used.

        loaded: the job's target, if it is in memory already
        ranks:  ranks that write the corpus together; None writes it on this one
        """
        check_output(job.output)
        check_memory(job.memory, this_machine())
        self.given = read_given(job)
        self.ranks = ranks
        read = [ReadTexts()] if job.learn_prompts and job.training.soft_share > 0 else []
        if self.given.read is not None:
            read.append(ReadTexts(self.given.read))
        self.loaded: LoadedTarget = loaded or load_target(
            job.model,
            dtype=job.dtype,
            quantize=job.quantize,
            offline=job.offline,
            progress=progress,
        )
        target = Target(self.loaded.model)
        check_trees(target)
        source = self.loaded.source
        self.recipe = recipe_for(
            job.drafter, target, source.name, source.fingerprint, job.training.draft_length
        )
        self.extras = self.recipe.extras(read)
        self.target = target.reading(self.recipe.context_layers)
        self._change(job)
        self.corpus: CorpusSize | None = None
        self.started_from: str | None = None
        if job.start_from is not None:
            self.recipe.check_start(job.start_from)
            self.started_from = weights_digest(job.start_from)
        found = load_checkpoint(job.output)
        if found is not None:
            check_same_run(found, self._made_by(), job.output)
        if self.ranks is not None:
            files = (str(path.relative_to(self.folder)) for path in self.corpus_job.files(0))
            corpus = {"corpus": self.corpus_key, "set of files": ", ".join(files)}
            self.ranks.agree({**facts_of(source, None), **corpus})

    @property
    def notes(self) -> list[str]:
        """Reasons why this run is slower than others, one line each."""
        if batch_cache(self.target) is not None:
            return []
        return [
            f"{self.target.model_type} takes no mask for each text of a batch: its texts are "
            f"written one at a time, about {self.job.writing.batch} times slower"
        ]

    def _plan(self, corpus_bytes: int | None = None) -> MemoryPlan:
        """Plan the memory of the run."""
        on_gpu = mx.default_device() == mx.Device(mx.gpu)
        workers = self.job.workers or (1 if on_gpu else min(os.cpu_count() or 1, 8))
        size = nbytes_of(self.loaded.model)
        return plan_memory(self.job, self.recipe, self.target, size, workers, corpus_bytes)

    @property
    def corpus_job(self) -> CorpusJob:
        given, room = self.given, self.plan.room
        return CorpusJob(
            self.job, given.conversations, self.folder, self.extras, given.exclude, room
        )

    def estimate(self, most_seconds: float = math.inf) -> Estimate:
        """Estimate the whole run, from trials that take about `most_seconds` at most."""
        tokenizer, corpus = self.loaded.tokenizer, self.corpus_job
        return estimate(corpus, self.recipe, self.target, tokenizer, self._plan, most_seconds)

    def begin(self, schedule: Schedule) -> None:
        """Plan a run for a time, or continue with its plan; errors as in `first_plan`."""
        if schedule.plan is None:
            if load_checkpoint(self.job.output) is not None:
                raise BadInputError(
                    f"{self.job.output} holds a run that was not planned by --hours; give another "
                    f"--output, or leave out --hours to resume it"
                )
            self.job = replace(self.job, training=replace(self.job.training, epochs=PLANNED_EPOCHS))
            trial = self.estimate(schedule.trial_seconds)
            fixed = self.ranks is not None  # the other ranks have no plan
            blocks = BlockSize.of(self.job, self.least_blocks, self.plan.workers, fixed=fixed)
            schedule.begin(trial, blocks)
        assert schedule.plan is not None
        self._change(schedule.plan.of(self.job))

    def finalize(self, schedule: Schedule) -> None:
        """Plan the passes over the written corpus, from a trial of training on it."""
        if schedule.plan is None or schedule.plan.final:
            return
        trainer = self._trainer()
        step, evaluation = trainer.trial(_TRIED_STEPS, schedule.trial_seconds)
        answers = len(self._trained_for(TIMED_SHAPES)) + 1
        question = answers * TIMED_TOKENS * plain_seconds(self.target)
        pace = Pace(step, evaluation, question)
        of_pass = trainer.steps / self.job.training.epochs
        self._change(schedule.finalize(pace, self._written.answer_tokens, of_pass).of(self.job))

    def _change(self, job: TrainingJob) -> None:
        """Continue with other sizes and passes; everything that was read for this run stays."""
        self.job, source = job, self.loaded.source
        self._options = to_toml(job)
        self.plan = self._plan()
        labels = (job.labels, job.training.draft_length) if job.data else None
        self.corpus_key = corpus_key(
            self._contents,
            source.dtype,
            job.writing,
            self.given,
            labels,
            None if job.data else told_to_think(self.loaded.tokenizer, job.writing),
        )
        self.folder = cache_dir() / "corpora" / self.corpus_key
        self._source = self.corpus_job.source(self.target, self.loaded.tokenizer)
        self.least_blocks = least_blocks(self._source, [job.data] if job.data else job.prompts)

    @cached_property
    def _contents(self) -> str:
        """What distinguishes the target from all others, quantised as it is in memory."""
        source = self.loaded.source
        contents = contents_of(source.path, source.fingerprint)
        return contents if source.bits is None else f"{contents} in {source.bits} bits"

    def write(
        self,
        progress: Callable[[CorpusSize], None] = lambda _: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> CorpusSize:
        """Stage one: write what is missing of the corpus, or less if `stop()`.

        Several ranks write it together. Then rank 0 continues alone, and the others end here.
        """
        job = self.job
        least = min(job.answer_tokens, 2 * job.training.batch)
        goal = CorpusGoal(job.answer_tokens, job.cache_bytes, self.least_blocks, least, stop)
        if self.ranks is None or self.ranks.leads:
            self._check_disk(goal)
        written = write_corpus(
            self.corpus_job, goal, self.plan.workers, self.loaded, progress, self.ranks
        )
        if self.ranks is not None:
            self.ranks.part()
        left_out = Counter(written.left_out) + Counter({EXCLUDED: self.given.left_out})
        self.corpus = replace(written, left_out=left_out)
        if written.answer_tokens < least:
            full = written.bytes >= job.cache_bytes
            raise BadInputError(
                f"the corpus holds {written.answer_tokens} answer tokens in "
                f"{written.bytes} bytes, too few to train on; "
                + ("raise cache_bytes" if full else f"{job.data} has no more of use")
            )
        return self.corpus

    def _check_disk(self, goal: CorpusGoal) -> None:
        """Raise NoRoomError unless the disk has room for what is missing of the corpus."""
        corpus, target = self.corpus_job, self.target
        size = CorpusGauge(corpus, goal).size()
        if goal.reached(size):
            return
        answers = goal.answer_tokens
        if isinstance(self._source, Reader):
            answers = self._source.count_tokens(answers)
        missing = stored_bytes(corpus, target, max(0, answers - size.answer_tokens))
        try:
            missing = min(missing, goal.max_bytes - size.bytes)
            check_free_disk(self.folder, missing, "REDRAFTER_CACHE")
        except NoRoomError as error:
            raise NoRoomError(
                f"the corpus: {error}, or write a smaller one (--answer-tokens, cache_bytes)"
            ) from error

    @property
    def _written(self) -> CorpusSize:
        assert self.corpus is not None, "write() first"
        return self.corpus

    def fit(self, stop: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """Stage two: train, starting where an earlier session of this run stopped."""
        trainer, job = self._trainer(), self.job
        with MetricsLog(job.output, trainer.steps_made) as log:
            with atomic_write(job.output / OPTIONS) as partial:
                partial.write_text(self._options, encoding="utf-8")
            for event in trainer.run(stop):
                log.append(event)
                yield event

    def _trainer(self) -> Trainer:
        """Return the training loop on the written corpus."""
        job, options, target = self.job, self.job.training, self.target
        shards = self._shards()
        trained_on, held_out = hold_out(shards, self._source.held_out, self.extras)
        counts = count_tokens(trained_on, target.vocab_size)
        answered = sum(summarise_shard(path).answer_tokens for path in trained_on)
        seen = next((texts for path in trained_on if (texts := self.extras.load(path))), [])
        if not seen:
            raise BadInputError("the corpus holds no text to train on; write more of it")
        if job.start_from is None:
            student = self.recipe.fresh(target, options, counts, seen)
        else:
            student = self.recipe.start(job.start_from, target, options)
        job.output.mkdir(parents=True, exist_ok=True)
        trained_on += [read for shard in shards for read in self.extras.read_shards(shard)]
        examples = Examples(
            tuple(trained_on),
            self.extras.each,
            options.draft_length,
            options.batch,
            self.plan.states,
            options.seed,
        )
        return Trainer(
            student,
            examples,
            held_out,
            options,
            options.steps(answered + self._written.read_tokens),
            self._trained_for(SHAPES),
            job.output,
            {**self._made_by(), "blocks": len(shards)},
            [text.copied() for text in seen[: max(1, len(held_out) // 4)]],
        )

    def measured_prompts(self) -> list[list[int]]:
        """Return held-out prompts for timing."""
        _, held_out = hold_out(self._shards(), self._source.held_out, self.extras)
        prompts = sorted((text.prompt for text in held_out), key=len)
        timed = self.job.timed_questions
        return prompts[:: max(1, len(prompts) // max(1, timed))][:timed]

    def measure(
        self,
        prompts: list[list[int]],
        done: Callable[[int], None] = lambda _: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> list[MeasuredRow]:
        """Stage three: time the best drafter and plain decoding, on this machine.

        After `stop()`, no more prompts are answered, but one always is.
        """
        redrafter = Redrafter(
            self.loaded.model, self.loaded.tokenizer, self.job.output, source=self.loaded.source
        )
        shapes = self._trained_for(TIMED_SHAPES)
        return measure_speed(redrafter, prompts, shapes, done=done, stop=stop)

    def finish(self, measured: list[MeasuredRow]) -> str | None:
        """Stage four: write the plots and the model card.

        Returns:
          one line on what could not be drawn, or None
        """
        note = draw_plots(self.job.output)
        write_card(self._report(measured), self.job.output)
        return note

    def _report(self, measured: list[MeasuredRow]) -> TrainingReport:
        """Return what the card states about this run."""
        log = read_metrics(self.job.output)
        return TrainingReport(
            target=self.loaded.source,
            job=self.job,
            versions={name: version(name) for name in ("mlx", "mlx-lm", "redrafter-mlx")},
            machine=f"{chip_name()}, {system_name()}",
            corpus=self._written,
            recipe=self.recipe,
            seconds=log[-1]["seconds"],
            quality=best_quality(log),
            measured=measured,
            started_from=self.started_from,
        )

    def _trained_for(self, shapes: Sequence[BeamShape]) -> list[BeamShape]:
        """Return the shapes, cut to the length that the drafter is trained to draft, each once."""
        most = self.job.training.draft_length + 1
        cut = (BeamShape(shape.width, min(shape.length, most)) for shape in shapes)
        return list(dict.fromkeys(cut))

    def _shards(self) -> list[Path]:
        """Return the shards of the written corpus, one per block."""
        corpus = self.corpus_job
        return [corpus.path(block) for block in range(self._written.blocks)]

    def _made_by(self) -> dict[str, object]:
        """Return what must stay the same to resume a run; all that is known before the corpus."""
        return {
            "target": self._contents,
            "corpus": self.corpus_key,
            "answer_tokens": self.job.answer_tokens,
            "cache_bytes": self.job.cache_bytes,
            "read": [texts.folder for texts in self.extras.read],
            "drafter": self.recipe.record,
            "training": asdict(self.job.training),
            "memory": self.plan.states,
            "started_from": self.started_from,
        }
