"""A run of `learn`: read, train, judge, and bring the drafter into use if it is better."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from mlx.utils import tree_map

from redrafter_mlx.checks import check_int, check_number
from redrafter_mlx.distill.corpus.examples import Examples, count_tokens
from redrafter_mlx.distill.drafter_forms import RecurrentForm
from redrafter_mlx.distill.forms.form import DRAFTS, Recipe, Student
from redrafter_mlx.distill.forms.registry import recipe_for, recipe_of_folder
from redrafter_mlx.distill.learn.judging import Judge, Quality
from redrafter_mlx.distill.learn.texts import (
    Split,
    general_texts,
    interleaved,
    read,
    split,
    up_to,
    write_shards,
)
from redrafter_mlx.distill.options import MAX_SEED, TrainOptions
from redrafter_mlx.distill.training.checkpoint import Progress
from redrafter_mlx.distill.training.learner import Learner, train
from redrafter_mlx.drafting.files.forms import DrafterFolder
from redrafter_mlx.drafting.level_drafter import LevelDrafter
from redrafter_mlx.drafting.names import AUTO, parse
from redrafter_mlx.errors import BadInputError, DamagedFileError
from redrafter_mlx.learning.folder import LearningFolder
from redrafter_mlx.learning.kept_texts import TextStore
from redrafter_mlx.learning.versions import (
    LearningRun,
    add_version,
    bring_into_use,
    in_use,
    record_run,
)
from redrafter_mlx.loading.drafter import open_drafter, prepare_drafter
from redrafter_mlx.loading.target import LoadedTarget

MIN_TEXTS = 4
"""Minimum number of answers to learn from: one of them is held out."""

_SHARES = (0.0, 0.25, 0.5, 0.75)
"""Shares of the weights that training started from, tried in turn until nothing is forgotten."""

_READING, _JUDGING = 0.3, 0.15  # shares of the time for the target's reading, and for judging

_JUDGED = 5.0  # held-out positions for each second of the time, the user's and general ones each

_STATES = 1_000_000_000  # bytes of hidden states that are in memory at once

_BATCH = 1024

_GENERAL = "writing general texts"

Report = Callable[[str, int, int], None]
"""Takes a stage's name, how far it is, and how far it goes."""


@dataclass(frozen=True)
class LearnOptions:
    """How long a run takes."""

    minutes: float = 10.0  # of reading, training and judging; general texts come on top, once
    steps: int | None = None  # number of optimiser steps instead, whatever they take
    seed: int = 0  # of the order of batches, and of a fresh head

    def __post_init__(self) -> None:
        check_number("minutes", self.minutes, low=0.1, high=24 * 60)
        check_int("seed", self.seed, 0, MAX_SEED)
        if self.steps is not None:
            check_int("steps", self.steps, 1, None)

    @property
    def seconds(self) -> float:
        return 60 * self.minutes


def learn(
    loaded: LoadedTarget,
    options: LearnOptions,
    report: Report = lambda *_: None,
    clock: Callable[[], float] = time.monotonic,
) -> LearningRun | None:
    """Train the drafter of a target on kept answers, and use the result if it is better.

    It is judged by `Quality`; until then, the earlier drafter stays in use. Returns None if no
    answer was kept since the drafter in use learned. Raises BadInputError if there are too few
    answers, if another process learns for this target, or if the drafter in use has a form not
    trained here.
    """
    folder, name = LearningFolder.of(loaded.source.fingerprint), loaded.source.name
    if not folder.path.exists():
        raise BadInputError(
            f"no answers of {name} are kept; `redrafter-mlx chat --learn` and `serve --learn` keep "
            f"them"
        )
    with folder.locked():
        kept = split(TextStore(folder.texts).texts(loaded.target.vocab_size))
        if len(kept) < MIN_TEXTS or not kept.training:
            raise BadInputError(
                f"{len(kept)} answers of {name} are kept, too few to learn from; ask {MIN_TEXTS} "
                f"different questions at least"
            )
        before = in_use(folder)
        if before is not None and kept.newest <= before.newest:
            return None
        shutil.rmtree(folder.work, ignore_errors=True)  # of a run that was killed
        try:
            run = _Run(loaded, folder, options, report, clock).learn(kept)
        finally:
            shutil.rmtree(folder.work, ignore_errors=True)
        record_run(folder, run)
        return run


class _Run:
    """One run, while nobody else learns for this target.

    start:  folder of the drafter in use; None if there is none, and a fresh head is trained
    recipe: how drafters of its form are made
    target: reads what that form reads
    """

    def __init__(
        self,
        loaded: LoadedTarget,
        folder: LearningFolder,
        options: LearnOptions,
        report: Report,
        clock: Callable[[], float],
    ) -> None:
        self._loaded, self._folder, self._options = loaded, folder, options
        self._report, self._clock = report, clock
        source, target = loaded.source, loaded.target
        self.start = drafter_in_use(loaded)
        if self.start is None:
            self.recipe: Recipe = recipe_for(
                RecurrentForm(), target, source.name, source.fingerprint, DRAFTS
            )
        else:
            named = source.name, source.fingerprint
            self.recipe = recipe_of_folder(self.start, target, *named)
        self.target = target.reading(self.recipe.context_layers)
        self._extras = self.recipe.extras([]).each

    def learn(self, kept: Split) -> LearningRun:
        report = self._report
        report(_GENERAL, 0, 1)
        # Half of them are held out, since they are few.
        written = general_texts(self._loaded, self._folder, partial(report, _GENERAL))
        general = split(written, one_in=2)
        began = self._clock()
        judge = self._judge(kept, general)
        shards, positions = self._read(kept, general, began)
        report("judging the drafter in use", 0, 1)
        drafter = self._drafter(shards)
        before = judge.quality(None if self.start is None else drafter)
        drafter = self.recipe.renewed(drafter, self.target, self._counts(shards))
        student = self.recipe.student(drafter, self.target, self._training(positions))
        start, trained_at = student.network.trainable_parameters(), self._clock()
        left = max(1.0, self._options.seconds * (1 - _JUDGING) - (trained_at - began))
        wanted, at = self._options.steps, Progress()

        def schedule(step: int) -> float:
            return (self._clock() - trained_at) / left if wanted is None else step / wanted

        examples = Examples(tuple(shards), self._extras, student.options, _STATES)
        for step, _ in train(Learner(student), examples, at, schedule):
            report("training", step.step, step.steps)
        seconds = self._clock() - trained_at
        after, version = self._try(student, start, judge, before, kept.newest)
        general_pair = None
        if before.general is not None and after.general is not None:
            general_pair = before.general, after.general
        return LearningRun(
            time.time(), len(kept), at.step, round(seconds, 1), (before.own, after.own),
            general_pair, version, self._options.seed,
        )  # fmt: skip

    def _judge(self, kept: Split, general: Split) -> Judge:
        max_tokens = max(200, int(_JUDGED * self._options.seconds))
        chosen = [up_to(texts, max_tokens) for texts in (kept.held_out, general.held_out)]
        self._report("reading held-out texts", 0, sum(map(len, chosen)))
        own, others = ([*read(self.target, texts)] for texts in chosen)
        return Judge(own, others)

    def _read(self, kept: Split, general: Split, began: float) -> tuple[list[Path], int]:
        """Read the texts that are trained on, the newest first, as many as time allows."""
        texts = interleaved(kept.training, general.training)
        total = sum(len(text.answer) for text in texts)

        def stop(positions: int) -> bool:
            self._report("reading answers", positions, total)
            by_time = self._options.steps is None
            return by_time and self._clock() - began > _READING * self._options.seconds

        folder, tokenizer = self._folder.work / "texts", self._loaded.tokenizer
        return write_shards(self.target, tokenizer, texts, self._extras, folder, stop)

    def _training(self, positions: int) -> TrainOptions:
        return TrainOptions(
            draft_length=self.recipe.drafts,
            batch=max(8, min(_BATCH, positions // 4)),
            seed=self._options.seed,
        ).for_size(self.target.hidden_size)

    def _drafter(self, shards: Sequence[Path]) -> LevelDrafter:
        """Return the drafter in use, or a fresh one for the texts in these shards."""
        counts = self._counts(shards)
        if self.start is None:
            texts = self._extras.load(shards[0])
            return self.recipe.fresh(self.target, counts(), texts, self._options.seed)
        return self.recipe.start(self.start, self.target, counts)

    def _counts(self, shards: Sequence[Path]) -> Callable[[], np.ndarray]:
        return partial(count_tokens, shards, self.target.vocab_size)

    def _try(
        self, student: Student, start: object, judge: Judge, before: Quality, newest: float
    ) -> tuple[Quality, str | None]:
        """Judge what was trained, and use it if it is better; return its quality and version.

        If general texts suffer, it is interpolated with the weights that training started from
        (Wortsman et al., arXiv 2109.01903), with more and more of them.
        """
        trained = student.network.trainable_parameters()
        candidate, quality = self._folder.work / "candidate", before
        for number, share in enumerate(_SHARES if self.start is not None else _SHARES[:1]):
            self._report("judging what was trained", number, len(_SHARES))
            mixed = tree_map(lambda s, end, w=share: w * s + (1 - w) * end, start, trained)
            student.network.update(mixed)
            try:
                self.recipe.save(student, candidate)  # judged as its files will be read
                saved = DrafterFolder(candidate, self._loaded.source).load(self.target)
                quality = judge.quality(saved)
            except DamagedFileError:  # its weights are not finite
                return replace(before, own=0.0), None
            if quality.is_better_than(before):
                return quality, self._use(candidate, newest)
            if quality.own <= before.own:
                break  # more of the start brings it nearer to the start
        return quality, None

    def _use(self, candidate: Path, newest: float) -> str:
        """Make a version of a drafter's files and bring it into use; return its name."""
        earlier = in_use(self._folder)
        parent = None if earlier is None or earlier.folder != self.start else earlier.name
        copy = partial(shutil.copytree, candidate, dirs_exist_ok=True)
        version = add_version(self._folder, copy, parent, newest)
        self._report("bringing it into use", 0, 1)
        bring_into_use(self._folder, version)
        return version.name


def drafter_in_use(loaded: LoadedTarget) -> Path | None:
    """Return the folder of the drafter that a target gets by default; None if there is none."""
    opened, _ = open_drafter(prepare_drafter(parse(AUTO)), loaded, offline=True)
    return None if opened is None else opened.bind(loaded.target, loaded.tokenizer).folder
