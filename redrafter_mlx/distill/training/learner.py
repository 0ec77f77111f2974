"""One step of training: losses and gradients of a few batches, and a step of the optimiser."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_map

from redrafter_mlx.distill.corpus.examples import Batch
from redrafter_mlx.distill.evaluation.draft_logits import output_index
from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.distill.training.loss import distillation_loss
from redrafter_mlx.distill.training.optimizer import drafter_optimizer
from redrafter_mlx.drafting.recurrent import RecurrentNetwork
from redrafter_mlx.target.model import Target


class Learner:
    """A drafter and its optimiser.

    Only the drafter's parameters are trained; the target is asked for its embedding and its
    output rows, and nothing else.
    """

    def __init__(
        self, drafter: RecurrentNetwork, target: Target, options: TrainOptions, steps: int
    ) -> None:
        self.drafter, self.options = drafter, options
        self.bound = drafter.bind(target).bound
        self._dtype = target.dtype
        self._outputs = output_index(self.bound, target.vocab_size)
        self._logits = target.logits_of(self.bound.tokens) if options.soft_share else None
        self.optimizer = drafter_optimizer(options, drafter.config, steps)
        self.optimizer.init(drafter.trainable_parameters())

    def step(self, batches: Sequence[Batch]) -> float:
        """One step of the optimiser over all of `batches`; their mean loss."""
        compute = nn.value_and_grad(self.drafter, self._loss)
        total, gradients = mx.zeros(()), None
        for batch in batches:
            loss, fresh = compute(batch)
            total = total + loss
            gradients = fresh if gradients is None else tree_map(mx.add, gradients, fresh)
            mx.eval(total, gradients)
        assert gradients is not None
        share = 1 / len(batches)
        mean = tree_map(lambda gradient: gradient * share, gradients)
        clipped, _ = optim.clip_grad_norm(mean, self.options.clip)
        self.optimizer.update(self.drafter, clipped)
        mx.eval(self.drafter.parameters(), self.optimizer.state)
        return _number(total) * share

    @property
    def learning_rate(self) -> float:
        return _number(self.optimizer.learning_rate)

    def teacher(self, states: mx.array) -> mx.array | None:
        """The soft labels: the target's probabilities [P, V'] of what can be drafted.

        states: [P, C], hidden states. None where soft labels have no share in the loss.
        """
        if self._logits is None:
            return None
        logits = self._logits(states[None].astype(self._dtype))[0]
        return mx.softmax(logits.astype(mx.float32), axis=-1)

    def _loss(self, batch: Batch) -> mx.array:
        opt = self.options
        return distillation_loss(
            self.bound,
            batch,
            self._outputs,
            self.teacher(batch.states),
            opt.depth_weights,
            opt.soft_share,
        )


def _number(scalar: mx.array) -> float:
    value = scalar.item()
    assert isinstance(value, float)
    return value
