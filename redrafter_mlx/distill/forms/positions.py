"""Training common to the forms without memory: they are trained position by position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import mlx.core as mx
import mlx.nn as nn

from redrafter_mlx.config import BeamShape
from redrafter_mlx.distill.corpus.examples import Batch, Examples
from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.evaluation.acceptance import (
    DraftQuality,
    draft_logits,
    measure_quality,
)
from redrafter_mlx.distill.forms.form import BatchLoss, Student
from redrafter_mlx.distill.forms.loss import distillation_loss
from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.drafting.level_drafter import MemorylessDrafter
from redrafter_mlx.target.model import Target


class PositionStudent(Student):
    """A student that drafts `draft_length` tokens at each position, fed with the labels before."""

    def __init__(self, drafter: MemorylessDrafter, target: Target, options: TrainOptions) -> None:
        self.drafter = drafter
        self._target, self._options = target, options
        self._outputs = drafter.vocabulary.index()
        soft = options.soft_share > 0
        self._logits = target.logits_of(drafter.vocabulary.tokens) if soft else None

    def losses(self, examples: Examples, epoch: int, skip: int) -> Iterator[BatchLoss]:
        for batch in examples.epoch(epoch, skip):
            yield partial(self.loss, batch)

    def trial(self) -> BatchLoss:
        P, T = self._options.batch, self._options.draft_length
        tokens = mx.random.randint(0, self._target.vocab_size, (P, T + 1), key=mx.random.key(0))
        states = mx.random.normal((P + T, self._target.context_size), key=mx.random.key(1))
        batch = Batch(
            states.astype(self._target.dtype),
            tokens[:, 0],
            tokens[:, 1:],
            mx.ones((P, T), mx.bool_),
            mx.ones((P,), mx.bool_),
        )
        return partial(self.loss, batch)

    def evaluate(self, held_out: Sequence[Text], shapes: Sequence[BeamShape]) -> DraftQuality:
        return measure_quality(self.drafter, held_out, self._options.draft_length, shapes)

    def loss(self, batch: Batch) -> mx.array:
        """Return the distillation loss of a batch."""
        options = self._options
        states = batch.states[: len(batch.roots)].astype(mx.float32)
        levels = self.drafter.levels_of(states, batch.roots, options.draft_length)
        return distillation_loss(
            draft_logits(levels, batch.labels),
            batch,
            self._outputs,
            self.teacher(batch.states),
            options.depth_weights,
            options.soft_share,
        )

    def teacher(self, states: mx.array) -> mx.array | None:
        """Return the soft labels: the target's probabilities of the draft vocabulary.

        Return None if soft labels have no share in the loss.

        Shapes:
          states: [P + T, C], hidden states
        Returns:
          [P + T, V']
        """
        if self._logits is None:
            return None
        logits = self._logits(states[None].astype(self._target.dtype))[0]
        return mx.softmax(logits.astype(mx.float32), axis=-1)


def logits_bytes(options: TrainOptions, output_size: int) -> int:
    """Return the bytes of a batch's logits, their gradients and the target's probabilities."""
    return 12 * options.batch * options.draft_length * output_size


def ready_to_train(network: nn.Module) -> None:
    """Convert a network to float32, put it into training mode and evaluate its parameters."""
    network.set_dtype(mx.float32)
    network.train()
    mx.eval(network.parameters())
