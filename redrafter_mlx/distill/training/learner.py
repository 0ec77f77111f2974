"""One step of training: losses and gradients of a few batches, and one optimiser step."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_map

from redrafter_mlx.distill.corpus.hidden_states import host_number
from redrafter_mlx.distill.forms.form import BatchLoss, Student
from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.distill.training.optimizer import drafter_optimizer


class Learner:
    """A student and its optimiser; only the student's network is trained."""

    def __init__(self, student: Student, options: TrainOptions, steps: int) -> None:
        self._network, self._options = student.network, options
        self.optimizer = drafter_optimizer(options, student.by_adamw, steps)
        self.optimizer.init(self._network.trainable_parameters())

    def step(self, losses: Sequence[BatchLoss]) -> float:
        """Take one optimiser step over the batches of all `losses`; return the mean loss."""
        total, gradients = mx.zeros(()), None
        for batch in losses:
            loss, fresh = nn.value_and_grad(self._network, batch)()
            total = total + loss
            gradients = fresh if gradients is None else tree_map(mx.add, gradients, fresh)
            mx.eval(total, gradients)
        assert gradients is not None
        share = 1 / len(losses)
        mean = tree_map(lambda gradient: gradient * share, gradients)
        clipped, _ = optim.clip_grad_norm(mean, self._options.clip)
        self.optimizer.update(self._network, clipped)
        mx.eval(self._network.parameters(), self.optimizer.state)
        return host_number(total) * share

    @property
    def learning_rate(self) -> float:
        return host_number(self.optimizer.learning_rate)
