"""One step of learning: losses of a few batches, their gradients, and a step of the optimiser."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_map

from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.distill.training.loss import Batch, distillation_loss, output_index
from redrafter_mlx.distill.training.optimizer import drafter_optimizer
from redrafter_mlx.drafting.recurrent import Drafter
from redrafter_mlx.target.model import Target

_SPREAD = 2.0
"""Of a fresh tied drafter's logits. The factors of a norm grow slowly, by no more than the learning
rate a step: begun far below what they end at, they hold all the rest back."""


class Learner:
    """A drafter and its optimiser.

    Only the drafter's parameters are trained; the target is asked for its embedding and its
    output rows, and nothing else.
    """

    def __init__(self, drafter: Drafter, target: Target, options: TrainOptions, steps: int) -> None:
        self.drafter, self.options = drafter, options
        self.bound = drafter.bind(target)
        self._dtype = target.dtype
        self._outputs = output_index(self.bound, target.vocab_size)
        self._logits = target.logits_of(self.bound.tokens) if options.soft_share else None
        self.optimizer = drafter_optimizer(options, drafter.config, steps)
        self.optimizer.init(drafter.trainable_parameters())

    def learn(self, batches: Sequence[Batch]) -> float:
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
        """The target's probabilities [P, V'] after hidden states [P, C], among the tokens that can
        be drafted; None if they are not learnt from."""
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


def initialise(
    drafter: Drafter, context_rms: mx.array, embedding_rms: float, logit_rms: float
) -> None:
    """Scale a fresh drafter's inputs to unit size, and a tied head's logits.

    A target's hidden states have a few coordinates far larger than the rest, and its embeddings
    are small; left as they are, the first would drown the others. The paper's form is scaled by its
    weights. What context layers read is far more uneven, and has a scale of its own: a weight that
    is a thousandth would be thrown about by every step of the optimiser.

    Args:
      context_rms: [C], of the hidden states, coordinate by coordinate
      logit_rms: of what a tied output layer makes of inputs of unit size
    """
    D = drafter.config.hidden_size
    unit = 1 / mx.maximum(context_rms, 1e-6)
    if drafter.config.context_layers:
        # The last state as it is, the layers' inputs not yet: that much is sure to help.
        last = mx.concatenate([mx.zeros((D, unit.size - D)), mx.eye(D)], axis=1)
        drafter.context_scale, unit = unit, mx.ones((D,))
        drafter.context_proj.weight, drafter.context_proj.bias = last, mx.zeros((D,))
    scale = mx.concatenate([unit, mx.ones((D,))])
    if drafter.config.exit_dim != 2 * D:
        drafter.input_proj.weight = drafter.input_proj.weight * scale
    else:
        for block in drafter.lm_head[: drafter.config.num_draft_layers]:
            block.linear.weight = block.linear.weight * scale
        if drafter.config.head == "tied":
            drafter.output_proj.weight = drafter.output_proj.weight * scale
        else:
            drafter.lm_head[-1].weight = drafter.lm_head[-1].weight * scale
    if drafter.config.rnn:
        drafter.rnn_w.weight = drafter.rnn_w.weight / embedding_rms
    if drafter.config.head == "tied":
        drafter.output_norm.weight = mx.full((D,), _SPREAD / logit_rms)


def context_size(states: np.ndarray) -> mx.array:
    """The root mean square [C] of hidden states [M, C], coordinate by coordinate."""
    return mx.sqrt(mx.mean(mx.square(mx.array(states).astype(mx.float32)), axis=0))


def embedding_size(target: Target, counts: np.ndarray) -> float:
    """The root mean square of the embeddings of the tokens with a count [V] above 0."""
    embedded = target.embedding(mx.array(np.flatnonzero(counts))).astype(mx.float32)
    return _number(mx.sqrt(mx.mean(mx.square(embedded))))


def logit_size(target: Target, tokens: mx.array | None) -> float:
    """The root mean square of the target's logits of `tokens` for random inputs of unit size."""
    drawn = mx.random.normal((64, target.hidden_size), key=mx.random.key(0)).astype(target.dtype)
    logits = target.output_rows(tokens)(drawn).astype(mx.float32)
    return _number(mx.sqrt(mx.mean(mx.square(logits))))


def _number(scalar: mx.array) -> float:
    value = scalar.item()
    assert isinstance(value, float)
    return value
