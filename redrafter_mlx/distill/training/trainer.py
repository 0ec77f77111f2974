"""The training loop, with a state that can be resumed exactly."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from redrafter_mlx.config import BeamShape
from redrafter_mlx.distill.corpus.examples import Examples
from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.evaluation.acceptance import DraftQuality
from redrafter_mlx.distill.forms.form import BatchLoss, Student
from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.distill.training.checkpoint import (
    Checkpoint,
    Progress,
    check_same_run,
    load_checkpoint,
    save_checkpoint,
)
from redrafter_mlx.distill.training.learner import Learner
from redrafter_mlx.errors import BadInputError

_SAVE_SECONDS = 120.0
"""Seconds between saves: the most that a killed run loses."""

_MOST_CACHED = 1_000_000_000
"""Bytes of unused memory that MLX may keep: batches of many sizes would leave it more and more."""


@dataclass(frozen=True)
class Step:
    """One step of the optimiser; `loss` is the mean over its batches."""

    step: int
    steps: int
    loss: float
    learning_rate: float
    positions_per_second: float


@dataclass(frozen=True)
class Evaluation:
    """Quality on held-out texts; `best` if it is the best so far, so that the drafter was saved.

    training_top1: by depth, how often the target's token is the likeliest draft, on training texts
    """

    step: int
    quality: DraftQuality
    best: bool
    training_top1: tuple[float, ...] = ()


Event = Step | Evaluation


class Trainer:
    """One training run of a drafter in a folder."""

    def __init__(
        self,
        student: Student,
        examples: Examples,
        held_out: Sequence[Text],
        options: TrainOptions,
        steps: int,
        shapes: Sequence[BeamShape],
        folder: Path,
        made_by: dict[str, object],
        seen: Sequence[Text] = (),
    ) -> None:
        """`seen` are training texts, to distinguish memorising from learning.

        Raises BadInputError if the folder holds another run.
        """
        self.seen = seen
        self.student, self.options = student, options
        self.examples, self.held_out, self.shapes = examples, held_out, shapes
        self.steps, self.folder, self.made_by = steps, folder, made_by
        self.learner = Learner(student, options, steps)
        self._start = self._weights() if options.keep_start else {}
        self._at = Progress()
        self._resume()

    @property
    def steps_made(self) -> int:
        """Number of optimiser steps so far, including earlier sessions of the run."""
        return self._at.step

    def trial(self, steps: int, most_seconds: float) -> tuple[float, float]:
        """Return the seconds of one step and of one evaluation.

        One to `steps` steps are timed: more than one if they fit in `most_seconds`. They train the
        drafter, which must not be kept.
        """
        batches = self._batches()
        times: list[float] = []
        while len(times) < 2 or (len(times) <= steps and sum(times) < most_seconds):
            began = time.monotonic()
            self.learner.step([next(batches) for _ in range(self.options.accumulate)])
            times.append(time.monotonic() - began)
        began = time.monotonic()
        self.student.evaluate(self.held_out, self.shapes)
        self._training_accuracy()
        return statistics.median(times[1:]), time.monotonic() - began  # the first step compiled

    def run(self, stop: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """Train to the end, or until `stop()`; save the state either way."""
        count = self.options.evaluations
        due = {max(1, round(self.steps * n / count)) for n in range(1, count + 1)}
        saved = time.monotonic()
        began, positions = time.monotonic(), 0
        batches = self._batches()
        while self._at.step < self.steps and not stop():
            loss = self.learner.step([next(batches) for _ in range(self.options.accumulate)])
            self._at.step += 1
            if mx.get_cache_memory() > _MOST_CACHED:
                mx.clear_cache()
            positions += self.options.batch * self.options.accumulate
            rate = positions / max(time.monotonic() - began, 1e-9)
            yield Step(self._at.step, self.steps, loss, self.learner.learning_rate, rate)
            if self._at.step in due:
                yield self._evaluate()
                began, positions = time.monotonic(), 0
            if time.monotonic() - saved > _SAVE_SECONDS:
                self.save()
                saved = time.monotonic()
        self.save()

    def save(self) -> None:
        """Write the run's state, from which the same command resumes."""
        optimizer = dict(tree_flatten(self.learner.optimizer.state))
        state = Checkpoint(self._weights(), optimizer, self.made_by, self._at)
        save_checkpoint(state, self.folder)

    def _weights(self) -> dict[str, mx.array]:
        """Return the trainable weights by dotted name."""
        return dict(tree_flatten(self.student.network.trainable_parameters()))

    def _resume(self) -> None:
        found = load_checkpoint(self.folder)
        if found is None:
            return
        check_same_run(found, self.made_by, self.folder)
        self.student.network.load_weights(list(found.drafter.items()), strict=False)
        self.learner.optimizer.state = tree_unflatten(list(found.optimizer.items()))
        self._at = found.progress

    def _batches(self) -> Iterator[BatchLoss]:
        """Yield batch after batch, pass after pass, from the run's current position on."""
        while True:
            got = False
            for batch in self.student.losses(self.examples, self._at.epoch, self._at.batch):
                self._at.batch += 1
                got = True
                yield batch
            if not got and self._at.batch == 0:
                raise BadInputError("the corpus is smaller than one batch; write more of it")
            self._at.epoch, self._at.batch = self._at.epoch + 1, 0

    def _evaluate(self) -> Evaluation:
        """Evaluate the drafter, and save it if it is the best so far."""
        with self._with_start():
            quality = self.student.evaluate(self.held_out, self.shapes)
            mean = sum(quality.tokens_per_step.values()) / len(quality.tokens_per_step)
            best = mean > self._at.best
            if best:
                self._at.best = mean
                self.student.save(self.folder)
            training = self._training_accuracy()
        return Evaluation(self._at.step, quality, best, training)

    def _training_accuracy(self) -> tuple[float, ...]:
        return self.student.evaluate(self.seen, ()).top1 if self.seen else ()

    @contextmanager
    def _with_start(self) -> Iterator[None]:
        """Within, interpolate the drafter's weights with those that it started from."""
        share = self.options.keep_start
        if not share:
            yield
            return
        trained = self._weights()
        mixed = [
            (name, share * self._start[name] + (1 - share) * trained[name]) for name in trained
        ]
        self.student.network.load_weights(mixed, strict=False)
        try:
            yield
        finally:
            self.student.network.load_weights(list(trained.items()), strict=False)
