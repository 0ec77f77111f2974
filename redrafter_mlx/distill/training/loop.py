"""The training loop: one optimiser step after another, until the schedule is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mlx.core as mx

from redrafter_mlx.distill.corpus.examples import Examples
from redrafter_mlx.distill.forms.form import BatchLoss, Student
from redrafter_mlx.distill.training.checkpoint import Progress
from redrafter_mlx.distill.training.learner import Learner
from redrafter_mlx.errors import BadInputError

_MAX_CACHED = 1_000_000_000
"""Bytes of unused memory that MLX may keep: batches of many sizes would leave it more and more."""


@dataclass(frozen=True)
class Step:
    """One step of the optimiser; `loss` is the mean over its batches.

    steps: expected total
    """

    step: int
    steps: int
    loss: float
    learning_rate: float
    positions_per_second: float


def train(
    learner: Learner,
    examples: Examples,
    at: Progress,
    schedule: Callable[[int], float],
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[Step, float]]:
    """Yield each step with the share of the training that is then over.

    Args:
      at:       position to start from, which each step advances
      schedule: returns the share of the training that is over after a number of steps, 1 at its end
      stop:     is asked before each step
    Raises BadInputError if the examples do not fill a batch.
    """
    options, batches = learner.student.options, _batches(learner.student, examples, at)
    seconds, positions, share = 0.0, 0, schedule(at.step)
    while share < 1 and not stop():
        began = time.monotonic()
        loss = learner.step([next(batches) for _ in range(options.batches)], share)
        if mx.get_cache_memory() > _MAX_CACHED:
            mx.clear_cache()
        seconds += time.monotonic() - began
        positions += options.batch * options.batches
        at.step += 1
        share = schedule(at.step)
        steps = max(at.step, round(at.step / max(share, 1e-9)))
        rate = positions / max(seconds, 1e-9)
        yield Step(at.step, steps, loss, learner.learning_rate, rate), share


def _batches(student: Student, examples: Examples, at: Progress) -> Iterator[BatchLoss]:
    """Yield batch after batch, pass after pass, from the run's current position on."""
    while True:
        for loss in student.losses(examples, at.epoch, at.batch):
            at.batch += 1
            yield loss
        if at.batch == 0:
            raise BadInputError(
                "the texts to train on do not fill one batch; more of them, or longer ones, do"
            )
        at.epoch, at.batch = at.epoch + 1, 0
