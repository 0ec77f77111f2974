"""Training for a given time: as many steps as fit, along one schedule of the learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, pairwise

import mlx.core as mx

from redrafter_mlx.distill.corpus.examples import Examples
from redrafter_mlx.distill.forms.form import BatchLoss, Student
from redrafter_mlx.distill.training.learner import Learner
from redrafter_mlx.errors import BadInputError

_TRIED = 3
"""Steps that are timed before the schedule is made; their training is dropped."""

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

    steps:   how many; None takes as many as fit into `seconds`
    seconds: after which the last step begins, if their number was not given
    done:    called after each step with the number of steps so far and in total
    """
    batches, many = _forever(student, examples), student.options.batches
    began, limit = clock(), None if steps is not None else seconds
    if steps is None:
        start = student.network.trainable_parameters()
        trial, times = Learner(student, 1), [clock()]
        while len(times) <= _TRIED and times[-1] - began < seconds / 4:
            trial.step([next(batches) for _ in range(many)])
            times.append(clock())
        student.network.update(start)
        per_step = min([b - a for a, b in pairwise(times)], default=1.0)
        steps = max(1, int((seconds - (times[-1] - began)) / max(per_step, 1e-3)))
    learner = Learner(student, steps)
    for step in range(1, steps + 1):
        learner.step([next(batches) for _ in range(many)])
        if mx.get_cache_memory() > _MOST_CACHED:
            mx.clear_cache()
        done(step, steps)
        if limit is not None and clock() - began > limit:
            return step
    return steps


def _forever(student: Student, examples: Examples) -> Iterator[BatchLoss]:
    """Yield the losses of one pass after the other."""
    for epoch in count():
        found = False
        for loss in student.losses(examples, epoch, 0):
            found = True
            yield loss
        if not found:
            raise BadInputError("the kept answers are too short to learn from; ask for longer ones")
