"""A whole training run: corpus, training, timing, report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version

from redrafter_mlx.config import BeamShape
from redrafter_mlx.distill.corpus.examples import Examples, count_tokens
from redrafter_mlx.distill.corpus.filters import EXCLUDED
from redrafter_mlx.distill.corpus.folder import (
    MORE_EMPTY,
    CorpusGauge,
    CorpusGoal,
    CorpusJob,
    CorpusSize,
)
from redrafter_mlx.distill.corpus.prompts.given_texts import corpus_key, read_given
from redrafter_mlx.distill.corpus.stored import corpora_folder
from redrafter_mlx.distill.corpus.workers import write_corpus
from redrafter_mlx.distill.corpus.written import WrittenCorpus
from redrafter_mlx.distill.evaluation.speed import MeasuredRow, measure_speed
from redrafter_mlx.distill.forms.registry import recipe_for
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.distill.memory_plan import (
    MemoryPlan,
    check_memory,
    check_states,
    plan_memory,
    states_held,
)
from redrafter_mlx.distill.options_file import OPTIONS, to_toml
from redrafter_mlx.distill.preflight import check_output, least_blocks, remove_leftovers
from redrafter_mlx.distill.report.card import TrainingReport, write_card
from redrafter_mlx.distill.report.metrics import MetricsLog, best_quality, training_seconds
from redrafter_mlx.distill.report.plots import draw_plots
from redrafter_mlx.distill.sizes import Sizes, check_disk, default_corpus_bytes, sizes
from redrafter_mlx.distill.training.checkpoint import check_same_run, read_checkpoint
from redrafter_mlx.distill.training.trainer import Event, Trainer
from redrafter_mlx.distributed.facts import facts_of
from redrafter_mlx.distributed.group import Ranks
from redrafter_mlx.drafting.forms import DrafterFolder
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.loading.target import LoadedTarget, load_target
from redrafter_mlx.runtime.atomic_write import atomic_write
from redrafter_mlx.runtime.device import chip_name, system_name
from redrafter_mlx.target_model.fingerprint import nbytes_of
from redrafter_mlx.target_model.tree_check import check_trees
from redrafter_mlx.weights import Progress
from redrafter_mlx.weights.files.folder import contents_of
from redrafter_mlx.weights.fit.machine import this_machine

SHAPES = tuple(BeamShape(width, 4) for width in (1, 2, 3, 4))
"""Beam shapes that a drafter is evaluated with."""

TIMED_SHAPES = (BeamShape(1, 2), BeamShape(1, 3), *SHAPES)
"""Beam shapes that a drafter is timed with."""


_TRIED = 30
"""Texts that the target writes, after its own prompts, before a run gives up if none is of use."""

_WITHOUT_TEMPLATE = (
    "train for it on plain texts: --data FILE --raw, or --prompts FILE --raw for texts that it "
    "continues"
)


class TrainingRun:
    """A job with its target in memory, stage by stage: `write`, `fit`, `measure`, `finish`."""

    _written: CorpusSize
    """The corpus, once `write` has ended."""

    def __init__(
        self,
        job: TrainingJob,
        progress: Progress | None = None,
        loaded: LoadedTarget | None = None,
        ranks: Ranks | None = None,
        *,
        dry: bool = False,
    ) -> None:
        """Raises RedrafterError, in one line, for prompts or a target that cannot be used.

        loaded: the job's target, if it is in memory already
        ranks:  ranks that write the corpus together; None writes it on this one
        dry:    leaves the target's weights on the disk: `sizes` is known, and nothing can be run
        """
        check_output(job.output)
        check_memory(job.memory, this_machine())
        self.given, self.ranks = read_given(job), ranks
        self.loaded: LoadedTarget = loaded or load_target(
            job.model,
            dtype=job.dtype,
            quantize=job.quantize,
            offline=job.offline,
            progress=progress,
            chat_or=None if job.raw else _WITHOUT_TEMPLATE,
            weights=not dry,
        )
        target, source = self.loaded.target, self.loaded.source
        if not dry:
            remove_leftovers(job.output)
            check_trees(target)
        self.recipe = recipe_for(
            job.drafter, target, source.name, source.fingerprint, job.training.draft_length
        )
        self.target = target.reading(self.recipe.context_layers)
        # What distinguishes the target from all others, quantised as it is in memory.
        self._contents = contents_of(source.path, source.fingerprint)
        if source.bits is not None:
            self._contents += f" in {source.bits} bits"
        found = read_checkpoint(job.output)
        # The free disk changes while a run is away; what it was bounded by does not.
        self._max_bytes = job.cache_bytes or (found and found.max_bytes)
        self.job = replace(job, training=job.training.for_size(self.target.hidden_size))
        self._prepare()
        given = job.start_from
        self.started_from = None if given is None else self.recipe.check_start(given)
        self._states = self.plan.states
        if found is not None:
            self._states = states_held(found.made_by.get("memory"), self.plan)
            check_same_run(job.output, found.made_by, self._made_by())
            check_states(self._states, self.plan, job.output)
        if ranks is not None:
            files = (str(path.relative_to(self.folder)) for path in self.corpus_job.files(0))
            corpus = {"corpus": self.folder.name, "set of files": ", ".join(files)}
            ranks.agree({**facts_of(source, None), **corpus})

    def _prepare(self) -> None:
        """Find the corpus that the job makes, and plan the memory."""
        job, given, tokenizer = self.job, self.given, self.loaded.tokenizer
        per_block = job.writing.batch
        read = [replace(texts, per_block=per_block) for texts in given.read]
        self.extras = self.recipe.extras(read)
        self.plan = self._plan()
        key = corpus_key(self._contents, self.loaded.source.dtype, job, given, tokenizer)
        self.folder = corpora_folder() / key
        self._max_bytes = self._max_bytes or default_corpus_bytes(self.folder)
        self.corpus_job = CorpusJob(
            job,
            given.conversations,
            self.folder,
            self.extras,
            given.exclude,
            self.plan.room,
            self._max_bytes,
        )
        self._source = self.corpus_job.source(self.target, tokenizer)
        self.least_blocks = least_blocks(self._source, [job.data] if job.data else job.prompts)

    def _plan(self, corpus_bytes: int | None = None) -> MemoryPlan:
        size = nbytes_of(self.loaded.model)
        return plan_memory(self.job, self.recipe, self.target, size, corpus_bytes=corpus_bytes)

    def _made_by(self) -> dict[str, object]:
        """Return what must stay the same to resume a run; all that is known before the corpus."""
        return {
            "target": self._contents,
            "corpus": self.folder.name,
            "answer_tokens": self.job.answer_tokens,
            "cache_bytes": self._max_bytes,
            "read": [texts.folder for texts in self.extras.read],
            "drafter": self.recipe.record,
            "training": asdict(self.job.training),
            "memory": self._states,
            "started_from": self.started_from,
        }

    @property
    def notes(self) -> list[str]:
        """What a user should know before the run, one line each: unused rows, slow writing."""
        if self.target.row_masks:
            return [*self.given.notes]
        return [
            *self.given.notes,
            f"{self.target.model_type} takes no mask for each text of a batch: its texts are "
            f"written one at a time, about {self.job.writing.batch} times slower",
        ]

    def sizes(self) -> Sizes:
        """Size up the whole run by arithmetic: nothing is computed with the target."""
        tokenizer, corpus = self.loaded.tokenizer, self.corpus_job
        return sizes(corpus, self.recipe, self.target, tokenizer, self._plan)

    def write(
        self,
        progress: Callable[[CorpusSize], None] = lambda _: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> CorpusSize:
        """Stage one: write what is missing of the corpus, or less if `stop()`.

        Several ranks write it together. Then rank 0 continues alone, and the others end here.
        """
        job, corpus = self.job, self.corpus_job
        least = min(job.answer_tokens, 2 * job.training.batch)
        # Blocks of the target's own prompts are all alike; given ones may be odd.
        own = not self.given.conversations
        goal = CorpusGoal(
            job.answer_tokens,
            corpus.max_bytes,
            self.least_blocks,
            max_empty=-(-_TRIED // job.writing.batch) if own else self.least_blocks + MORE_EMPTY,
            least_tokens=least,
            stop=stop,
        )
        if self.ranks is None or self.ranks.leads:
            check_disk(corpus, goal, self.recipe, self.target, self.loaded.tokenizer, self._source)
        written = write_corpus(corpus, goal, self.plan.workers, self.loaded, progress, self.ranks)
        if self.ranks is not None:
            self.ranks.leave()
        # As the same command will find it again, once it is planned for what was written.
        goal = replace(goal, answer_tokens=written.answer_tokens)
        written = CorpusGauge(corpus, goal).size()
        left_out = Counter(written.left_out) + Counter({EXCLUDED: self.given.left_out})
        self._written = replace(written, left_out=left_out)
        goal.check_enough(self._written, job.data)
        return self._written

    def ask_for_what_is_written(self) -> None:
        """Make the written corpus the one that was asked for, in a run that time ends."""
        self.job = replace(self.job, answer_tokens=self._written.answer_tokens)

    def fit(
        self, stop: Callable[[], bool] = lambda: False, passed: Callable[[], float] = lambda: 0.0
    ) -> Iterator[Event]:
        """Stage two: train, starting where an earlier session of this run stopped.

        passed: as in `Trainer.run`; the passes that were made are then those asked for
        """
        trainer = self.trainer()
        with MetricsLog(self.job.output, trainer.steps_made) as log:
            self._write_options()
            for event in trainer.run(stop, passed):
                log.append(event)
                yield event
        if passed() >= 1:
            training = self.job.training
            made = round(training.epochs * trainer.steps_made / trainer.steps, 2)
            self.job = replace(self.job, training=replace(training, epochs=made or 0.01))
            self._write_options()

    def _write_options(self) -> None:
        with atomic_write(self.job.output / OPTIONS) as written:
            written.write_text(to_toml(self.job), encoding="utf-8")

    def trainer(self) -> Trainer:
        """Return the training loop on the written corpus."""
        job, options, target, extras = self.job, self.job.training, self.target, self.extras
        corpus = self.corpus
        trained_on, held_out = corpus.parts
        first = next((texts for path in trained_on if (texts := extras.load(path))), [])
        if not first:
            raise BadInputError("the corpus holds no text to train on; write more of it")
        counts = partial(count_tokens, tuple(trained_on), target.vocab_size)
        if job.start_from is None:
            drafter = self.recipe.fresh(target, counts(), first, options.seed)
        else:
            drafter = self.recipe.start(job.start_from, target, counts)
        job.output.mkdir(parents=True, exist_ok=True)
        student = self.recipe.student(drafter, target, options)
        examples = Examples((*trained_on, *corpus.only_read), extras.each, options, self._states)
        return Trainer(
            student,
            examples,
            held_out,
            options.steps(student.batches(examples)),
            self._trained_for(SHAPES),
            job.output,
            {**self._made_by(), "blocks": corpus.blocks},
            corpus.sample(),
        )

    @property
    def corpus(self) -> WrittenCorpus:
        return WrittenCorpus(self.corpus_job, self._source, self._written.blocks)

    def _trained_for(self, shapes: Sequence[BeamShape]) -> list[BeamShape]:
        """Return the shapes, cut to the length that the drafter is trained to draft, each once."""
        most = self.job.training.draft_length + 1
        cut = (BeamShape(shape.width, min(shape.length, most)) for shape in shapes)
        return list(dict.fromkeys(cut))

    def measured_prompts(self) -> list[list[int]]:
        """Return held-out prompts for timing."""
        return self.corpus.prompts(self.job.timed_questions)

    def measure(
        self,
        prompts: list[list[int]],
        done: Callable[[int], None] = lambda _: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> list[MeasuredRow]:
        """Stage three: time the best drafter and plain decoding, on this machine.

        After `stop()`, no more prompts are answered, but one always is.
        """
        loaded, shapes = self.loaded, self._trained_for(TIMED_SHAPES)
        trained = DrafterFolder(self.job.output, loaded.source)
        redrafter = Redrafter(loaded.model, loaded.tokenizer, trained, source=loaded.source)
        return measure_speed(redrafter, prompts, shapes, done, stop)

    def finish(self, measured: list[MeasuredRow]) -> str | None:
        """Stage four: write the plots and the model card; return a line on what is not drawn."""
        output = self.job.output
        note = draw_plots(output)
        report = TrainingReport(
            target=self.loaded.source,
            job=self.job,
            versions={name: version(name) for name in ("mlx", "mlx-lm", "redrafter-mlx")},
            machine=f"{chip_name()}, {system_name()}",
            corpus=self._written,
            recipe=self.recipe,
            seconds=training_seconds(output),
            quality=best_quality(output),
            measured=measured,
            started_from=self.started_from,
        )
        write_card(report, output)
        return note
