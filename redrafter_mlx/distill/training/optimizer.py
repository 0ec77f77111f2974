"""The optimiser: Muon for a drafter's matrices, AdamW for all other parameters.

Muon (Jordan et al., https://kellerjordan.github.io/posts/muon; mlx.optimizers.Muon) replaces the
running mean of a matrix's gradients by the nearest orthogonal matrix and uses that as the update.
So all directions are trained at the same speed. A step takes longer, but far fewer are needed.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.optimizers as optim

from redrafter_mlx.distill.options import TrainOptions

_MUON = 20.0
"""Muon's learning rate as a multiple of AdamW's. Muon's updates are orthogonal: in a matrix of a
thousand rows their entries are about thirty times smaller than AdamW's, which are close to signs.
"""


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
