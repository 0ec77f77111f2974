"""One step of training: losses and gradients of a few batches, and one optimiser step.

The optimiser is Muon for a drafter's matrices, AdamW for all other parameters. Muon (Jordan et al.,
https://kellerjordan.github.io/posts/muon; mlx.optimizers.Muon) replaces the running mean of a
matrix's gradients by the nearest orthogonal matrix and uses that as the update. So all directions
are trained at the same speed. A step takes longer, but far fewer are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map

from redrafter_mlx.distill.forms.form import BatchLoss, Recipe, Student
from redrafter_mlx.distill.options import TrainOptions

_MUON = 20.0
"""Muon's learning rate as a multiple of AdamW's. Muon's updates are orthogonal: in a matrix of a
thousand rows their entries are about thirty times smaller than AdamW's, which are close to signs.
"""


class Learner:
    """A student and its optimiser; only the student's network is trained."""

    def __init__(self, student: Student, steps: int) -> None:
        self.network, self._clip = student.network, student.options.clip
        self.optimizer = drafter_optimizer(student.options, student.recipe.by_adamw, steps)
        self.optimizer.init(self.network.trainable_parameters())

    def step(self, losses: Sequence[BatchLoss]) -> float:
        """Take one optimiser step over the batches of all `losses`; return the mean loss."""
        total, gradients = mx.zeros(()), None
        for batch in losses:
            loss, fresh = nn.value_and_grad(self.network, batch)()
            total = total + loss
            gradients = fresh if gradients is None else tree_map(mx.add, gradients, fresh)
            del fresh  # gradients are as large as the network: no name keeps them for longer
            mx.eval(total, gradients)
        assert gradients is not None
        share = 1 / len(losses)
        gradients = tree_map(lambda gradient: gradient * share, gradients)
        gradients, _ = optim.clip_grad_norm(gradients, self._clip)
        self.optimizer.update(self.network, gradients)
        del gradients
        mx.eval(self.network.parameters(), self.optimizer.state)
        return float(total) * share

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.learning_rate)


def checkpoint_bytes(recipe: Recipe, options: TrainOptions) -> int:
    """Return the size of a run's checkpoint: weights and optimiser state, in float32."""
    network = recipe.network()
    network.set_dtype(mx.float32)
    weights = network.trainable_parameters()
    optimizer = drafter_optimizer(options, recipe.by_adamw, 1)
    optimizer.init(weights)  # nothing is evaluated
    arrays = cast(list[tuple[str, mx.array]], tree_flatten([weights, optimizer.state]))
    return sum(array.nbytes for _, array in arrays)


def drafter_optimizer(
    options: TrainOptions, by_adamw: Callable[[str], bool], steps: int
) -> optim.Optimizer:
    """Return the optimiser of a run of `steps` steps; `by_adamw` selects matrices for AdamW."""
    as_torch = options.optimizer == "adamw_torch"
    adamw = optim.AdamW(
        learning_rate=_schedule(options, steps, options.learning_rate),
        betas=[0.9, 0.999 if as_torch else 0.95],
        weight_decay=options.weight_decay,
        bias_correction=as_torch,
    )
    if options.optimizer != "muon":
        return adamw
    muon = optim.Muon(
        learning_rate=_schedule(options, steps, _MUON * options.learning_rate), weight_decay=0.0
    )

    def others(name: str, parameter: mx.array) -> bool:
        return parameter.ndim != 2 or by_adamw(name)

    return optim.MultiOptimizer([adamw, muon], [others])


def _schedule(options: TrainOptions, steps: int, high: float) -> Callable[[mx.array], mx.array]:
    """Return a warm-up followed by a cosine decay to the share `final_rate` of `high`."""
    warmup = max(1, round(options.warmup_share * steps))
    rise = optim.linear_schedule(high / warmup, high, warmup)
    fall = optim.cosine_decay(high, max(1, steps - warmup), high * options.final_rate)
    joined: Callable[[mx.array], mx.array] = optim.join_schedules([rise, fall], [warmup])
    return joined
