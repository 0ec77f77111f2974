"""A training run in a folder: evaluated, saved, and resumed exactly."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx.utils import tree_map

from redrafter_mlx.config import BeamShape
from redrafter_mlx.distill.corpus.examples import Examples
from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.evaluation.acceptance import DraftQuality
from redrafter_mlx.distill.forms.form import Student
from redrafter_mlx.distill.training.checkpoint import (
    Checkpoint,
    Progress,
    load_checkpoint,
    save_checkpoint,
)
from redrafter_mlx.distill.training.learner import Learner, Step, train
from redrafter_mlx.weights import LOG
from redrafter_mlx.weights.files.names import WEIGHTS

SAVE_SECONDS = 120.0
"""Seconds between saves: the most that a killed run loses."""

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Evaluation:
    """Quality on held-out texts; `best` if it is the best so far, so that the drafter was saved."""

    step: int
    quality: DraftQuality
    best: bool
    # by depth, how often the target's token is the likeliest draft, on training texts
    training_top1: tuple[float, ...] = ()


Event = Step | Evaluation


class Trainer:
    """One training run of a drafter in a folder."""

    def __init__(
        self,
        student: Student,
        examples: Examples,
        held_out: Sequence[Text],
        steps: int,
        shapes: Sequence[BeamShape],
        folder: Path,
        made_by: dict[str, object],
        seen: Sequence[Text] = (),
    ) -> None:
        """`seen` are training texts, to distinguish memorising from learning.

        Raises BadInputError if the folder holds another run.
        """
        self.student, self.options, self.examples = student, student.options, examples
        self.held_out, self.shapes, self.seen = held_out, shapes, seen
        self.steps, self.folder, self.made_by = steps, folder, made_by
        self.network, self.learner = student.network, Learner(student)
        self._start = self.network.trainable_parameters() if self.options.keep_start else {}
        self._at = Progress()
        found = load_checkpoint(folder, made_by, self.network.trainable_parameters())
        if found is not None:
            self.network.update(found.drafter, strict=False)
            self.learner.optimizer.state = dict(found.optimizer)
            self._at = found.progress
            drafter = folder / WEIGHTS
            if self._at.saved and self._at.saved != _digest(drafter):
                LOG.warning("%s has changed since this run saved it; it is written again", drafter)
                self._at.best = 0.0

    @property
    def steps_made(self) -> int:
        return self._at.step

    def run(
        self, stop: Callable[[], bool] = lambda: False, passed: Callable[[], float] = lambda: 0.0
    ) -> Iterator[Event]:
        """Train to the end of the steps or the time that `passed`, or until `stop()`, and save."""
        count, saved = self.options.evaluations, time.monotonic()

        def schedule(step: int) -> float:
            return min(1.0, max(step / self.steps, passed()))

        share = schedule(self._at.step)
        for step, over in train(self.learner, self.examples, self._at, schedule, stop):
            due, share = int(share * count + _ROUNDING), over
            yield step
            best = False
            if int(share * count + _ROUNDING) > due:
                evaluation = self._evaluate()
                yield evaluation
                best = evaluation.best  # its checkpoint knows the drafter that was saved
            if best or time.monotonic() - saved > SAVE_SECONDS:
                self.save()
                saved = time.monotonic()
        if share >= 1 and not self._at.best:
            yield self._evaluate()
        self.save()

    def save(self) -> None:
        """Write the run's state, from which the same command resumes."""
        weights, optimizer = self.network.trainable_parameters(), self.learner.optimizer
        save_checkpoint(Checkpoint(weights, optimizer.state, self.made_by, self._at), self.folder)

    def _evaluate(self) -> Evaluation:
        """Evaluate the drafter, interpolated with its start, and save it if it is the best yet."""
        trained, share = self.network.trainable_parameters(), self.options.keep_start
        if share:
            mixed = tree_map(lambda s, end: share * s + (1 - share) * end, self._start, trained)
            self.network.update(mixed)
        quality = self.student.evaluate(self.held_out, self.shapes)
        mean = sum(quality.tokens_per_step.values()) / len(quality.tokens_per_step)
        best = mean > self._at.best
        if best:
            self._at.best = mean
            self.student.recipe.save(self.student, self.folder)
            self._at.saved = _digest(self.folder / WEIGHTS)
        training = self.student.evaluate(self.seen, ()).top1 if self.seen else ()
        self.network.update(trained)
        return Evaluation(self._at.step, quality, best, training)


def _digest(file: Path) -> str:
    """Return the SHA-256 of a file, "" if it is not there."""
    if not file.exists():
        return ""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
