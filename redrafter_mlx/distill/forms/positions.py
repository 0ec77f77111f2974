"""What the forms have in common that remember nothing: they are trained position by position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import mlx.core as mx
import mlx.nn as nn

from redrafter_mlx.config import BeamShape
from redrafter_mlx.distill.corpus.examples import Batch, Examples
from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.evaluation.acceptance import DraftQuality, measure_quality
from redrafter_mlx.distill.evaluation.draft_logits import draft_logits, levels_along
from redrafter_mlx.distill.forms.form import BatchLoss, Student
from redrafter_mlx.distill.forms.loss import distillation_loss
from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.drafting.level_drafter import MemorylessDrafter
from redrafter_mlx.target.model import Target


class PositionStudent(Student):
    """At each position it drafts `draft_length` tokens, each fed with the labels before it."""

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
        """The distillation loss of a batch."""
        options = self._options
        levels = levels_along(self.drafter, batch, options.draft_length)
        return distillation_loss(
            draft_logits(levels, batch.labels),
            batch,
            self._outputs,
            self.teacher(batch.states),
            options.depth_weights,
            options.soft_share,
        )

    def teacher(self, states: mx.array) -> mx.array | None:
        """The soft labels: the target's probabilities [P, V'] of what can be drafted.

        states: [P, C], hidden states. None where soft labels have no share in the loss.
        """
        if self._logits is None:
            return None
        logits = self._logits(states[None].astype(self._target.dtype))[0]
        return mx.softmax(logits.astype(mx.float32), axis=-1)


def logits_bytes(options: TrainOptions, output_size: int) -> int:
    """Of the logits of a batch, with their gradients and the target's probabilities."""
    return 12 * options.batch * options.draft_length * output_size


def ready_to_train(network: nn.Module) -> None:
    """Put a network into float32 and into training, and evaluate its parameters."""
    network.set_dtype(mx.float32)
    network.train()
    mx.eval(network.parameters())
