"""Training for a given time, along one schedule of the learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import mlx.core as mx

from redrafter_mlx.distill.corpus.examples import Examples
from redrafter_mlx.distill.forms.form import BatchLoss, Student
from redrafter_mlx.distill.training.learner import Learner
from redrafter_mlx.errors import BadInputError

_MOST_CACHED = 1_000_000_000
"""Bytes of unused memory that MLX may keep."""


def train(
    student: Student,
    examples: Examples,
    steps: int | None,
    seconds: float,
    clock: Callable[[], float],
    done: Callable[[int, int], None] = lambda *_: None,
) -> int:
    """Train a student; return the number of optimiser steps.

    steps:   how many; None takes as many as begin within `seconds`, one at least
    done:    called after each step with the number of steps so far and, as expected, in total
    """
    batches, many = _forever(student, examples), student.options.batches
    learner, began, step, progress = Learner(student), clock(), 0, 0.0
    while progress < 1:
        learner.step([next(batches) for _ in range(many)], progress)
        if mx.get_cache_memory() > _MOST_CACHED:
            mx.clear_cache()
        step += 1
        progress = (clock() - began) / seconds if steps is None else step / steps
        done(step, max(step, round(step / max(progress, 1e-9))))
    return step


def _forever(student: Student, examples: Examples) -> Iterator[BatchLoss]:
    """Yield the losses of one pass after the other."""
    for epoch in count():
        found = False
        for loss in student.losses(examples, epoch, 0):
            found = True
            yield loss
        if not found:
            raise BadInputError("the kept answers are too short to learn from; ask for longer ones")
