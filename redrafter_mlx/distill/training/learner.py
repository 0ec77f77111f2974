"""One step of training: losses and gradients of a few batches, and one optimiser step.

The optimiser is Muon for a drafter's matrices, AdamW for all other parameters. Muon (Jordan et al.,
https://kellerjordan.github.io/posts/muon; mlx.optimizers.Muon) replaces the running mean of a
matrix's gradients by the nearest orthogonal matrix and uses that as the update. So all directions
are trained at the same speed. A step takes longer, but far fewer are needed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map

from redrafter_mlx.distill.corpus.examples import Examples
from redrafter_mlx.distill.forms.form import BatchLoss, Recipe, Student
from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.distill.training.checkpoint import Progress
from redrafter_mlx.errors import BadInputError

_MUON = 20.0
"""Muon's learning rate as a multiple of AdamW's. Muon's updates are orthogonal: in a matrix of a
thousand rows their entries are about thirty times smaller than AdamW's, which are close to signs.
"""

_LOSS_SCALE = 2.0**30
"""Factor of the loss on its way back through a network. Without it, parts of the gradients are
subnormal numbers, with which an x86 processor multiplies many times more slowly. As it is a power
of two, no other number is rounded differently (loss scaling, Micikevicius et al., arXiv 1710.03740,
section 3.2). Losses have to be computed in float32: float16 ends at 65504."""

_FIRST_RATE = 0.1  # the first learning rate, as a share of the peak


_MAX_CACHED = 1_000_000_000
"""Bytes of unused memory that MLX may keep: batches of many sizes would leave it more and more."""


class Learner:
    """A student and its optimiser; only the student's network is trained."""

    def __init__(self, student: Student) -> None:
        self.student, self.network, self._options = student, student.network, student.options
        self.optimizer = drafter_optimizer(student.options, student.recipe.by_adamw)
        self.optimizer.init(self.network.trainable_parameters())

    def step(self, losses: Sequence[BatchLoss], progress: float) -> float:
        """Take one optimiser step over the batches of all `losses`; return the mean loss.

        progress: share of the training that is over, 0 to 1, which sets the learning rate
        """
        rate = learning_rate(self._options, progress)
        for optimizer, multiple in zip(self.optimizer.optimizers, (1.0, _MUON), strict=False):
            optimizer.learning_rate = multiple * rate
        total, gradients = mx.zeros(()), None
        for batch in losses:
            loss, fresh = nn.value_and_grad(self.network, _scaled(batch))()
            total = total + loss / _LOSS_SCALE
            gradients = fresh if gradients is None else tree_map(mx.add, gradients, fresh)
            del fresh  # gradients are as large as the network: no name keeps them for longer
            mx.eval(total, gradients)
        assert gradients is not None
        share = 1 / len(losses)
        gradients = tree_map(lambda gradient: gradient * (share / _LOSS_SCALE), gradients)
        gradients, _ = optim.clip_grad_norm(gradients, self._options.clip)
        self.optimizer.update(self.network, gradients)
        del gradients
        mx.eval(self.network.parameters(), self.optimizer.state)
        return float(total) * share

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.learning_rate)


def _scaled(loss: BatchLoss) -> BatchLoss:
    return lambda: _LOSS_SCALE * loss()


def checkpoint_bytes(recipe: Recipe, options: TrainOptions) -> int:
    """Return the size of a run's checkpoint: weights and optimiser state, in float32."""
    network = recipe.network()
    network.set_dtype(mx.float32)
    weights = network.trainable_parameters()
    optimizer = drafter_optimizer(options, recipe.by_adamw)
    optimizer.init(weights)  # nothing is evaluated
    arrays = cast(list[tuple[str, mx.array]], tree_flatten([weights, optimizer.state]))
    return sum(array.nbytes for _, array in arrays)


def drafter_optimizer(
    options: TrainOptions, by_adamw: Callable[[str], bool]
) -> optim.MultiOptimizer:
    """Return AdamW, and Muon unless the options leave it out; `by_adamw` takes matrices from Muon.

    Their learning rates are set at each step.
    """
    as_torch = options.optimizer == "adamw_torch"
    adamw = optim.AdamW(
        learning_rate=options.learning_rate,
        betas=[0.9, 0.999 if as_torch else 0.95],
        weight_decay=options.weight_decay,
        bias_correction=as_torch,
    )
    if options.optimizer != "muon":
        return optim.MultiOptimizer([adamw])
    muon = optim.Muon(learning_rate=_MUON * options.learning_rate, weight_decay=0.0)

    def others(name: str, parameter: mx.array) -> bool:
        return parameter.ndim != 2 or by_adamw(name)

    return optim.MultiOptimizer([adamw, muon], [others])


def learning_rate(options: TrainOptions, progress: float) -> float:
    """Return AdamW's rate: a warm-up, then a cosine decay to the share `final_rate` of its peak.

    progress: share of the training that is over, 0 to 1
    """
    peak, warmup = options.learning_rate, options.warmup_share
    if progress < warmup:
        return peak * (_FIRST_RATE + (1 - _FIRST_RATE) * progress / warmup)
    over = min(1.0, (progress - warmup) / (1 - warmup)) if warmup < 1 else 1.0
    left = (1 + math.cos(math.pi * over)) / 2
    return peak * (options.final_rate + (1 - options.final_rate) * left)


@dataclass(frozen=True)
class Step:
    """One step of the optimiser; `loss` is the mean over its batches."""

    step: int
    steps: int  # expected total
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

    at:       position to start from, which each step advances
    schedule: returns the share of the training that is over after a number of steps, 1 at its end
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
