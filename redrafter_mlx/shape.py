"""Which beam shape to draft with next: the one that promises the most tokens per second.

Expected tokens come from the odds of acceptance, seconds from the measured cost curves. Plain
decoding is one of the shapes. Where it promises most it is what happens, and now and then a small
draft looks whether that has changed. What these looks cost is bounded: each must have been saved
up for, as a small share of the time spent, and what it gains is paid back, so that a look which
succeeds is followed by another at once.

Everything here is arithmetic on the host with what earlier steps have reported.
"""

from __future__ import annotations

from redrafter_mlx.config import PLAIN, BeamShape
from redrafter_mlx.costs import CostCurves
from redrafter_mlx.odds import Odds, Verified

WIDEST = 4
LENGTHS = (2, 3, 4, 5, 6, 8)
"""Shapes beyond these are not tried by themselves."""

_CAPACITIES = (6, 8, 10, 13, 16, 20, 24, 28)
"""Row counts to which trees are cut on every machine; those before its cliffs come to them."""

_STAY = 0.01
"""Another shape must promise so much more than the one in use."""

_LOOK_SHARE = 0.02
"""Of the time spent decoding plainly, how much may go into looking whether drafting pays."""

_MOST_LOOKS = 3
"""Looks that can be saved up: one that misses does not end a row of them."""

_CONTEXT_STEP = 64
"""Costs are looked up again after so many tokens."""


class ShapePolicy:
    """The shapes of one answer, step by step.

    odds: what was learned so far
    """

    def __init__(self, curves: CostCurves, odds: Odds | None = None) -> None:
        """`odds` to begin with, which are learned on; their shapes are those to choose from."""
        self._curves = curves
        self.odds = Odds(candidates(curves)) if odds is None else odds
        self._costs: dict[BeamShape, float] = {}
        self._context = -1
        self._best = PLAIN
        self._look = PLAIN
        self._savings = 0.0
        self._stale = True

    def next_shape(self, length: int) -> BeamShape:
        """The shape to draft with behind `length` tokens."""
        self._look_up_costs(length)
        if self._stale:
            self._choose(length)
        if self._best != PLAIN or self._look == PLAIN:
            return self._best
        plain = self._costs[PLAIN]
        price = self._costs[self._look] - plain
        self._savings = min(self._savings + _LOOK_SHARE * plain, _MOST_LOOKS * max(price, 0.0))
        if self._savings < price:
            return PLAIN
        self._savings -= price
        return self._look

    def learn(self, step: Verified) -> None:
        """Take note of a step that was read; they may come some steps late."""
        if step.shape.length == 1:
            self.odds.rest()
            return
        self.odds.learn(step)
        self._savings += (len(step.path) - 1) * self._costs.get(PLAIN, 0.0)
        self._stale = True

    def rates(self, length: int) -> dict[BeamShape, float]:
        """Tokens a second that each shape promises behind `length` tokens."""
        self._look_up_costs(length)
        rates = {shape: n / self._costs[shape] for shape, n in self.odds.tokens().items()}
        return {PLAIN: 1 / self._costs[PLAIN], **rates}

    def _choose(self, length: int) -> None:
        self._stale = False
        rates = self.rates(length)
        best = max(rates, key=lambda s: rates[s])
        if rates[best] > rates[self._best] * (1 + _STAY):
            if best == PLAIN:
                self._savings = 0.0
            self._best = best

    def _look_up_costs(self, length: int) -> None:
        context = length // _CONTEXT_STEP
        if context == self._context:
            return
        self._context = context
        self._costs = {s: self._curves.step(s, length) for s in (PLAIN, *self.odds.shapes)}
        self._look = min(self.odds.shapes, key=lambda s: self._costs[s], default=PLAIN)
        self._stale = True


def candidates(curves: CostCurves, widest: int = WIDEST) -> tuple[BeamShape, ...]:
    """The few shapes worth a choice on this machine, plain decoding aside.

    Every width and length that was measured, whole, and cut to a ladder of row counts and to
    those behind which the call becomes dearer, with room for a draft of each beam: a beam that no
    node is left for only costs. A shape is left out when a larger one costs no more at either
    context: it would never be better.
    """
    widest = min(widest, WIDEST, max((w for w, *_ in curves.draft), default=0))
    longest = max((n for _, n, _ in curves.draft), default=0)
    cuts = sorted({*_CAPACITIES, *(c.rows for c in curves.cliffs())})
    found = set()
    for width in range(1, widest + 1):
        for length in (n for n in LENGTHS if n <= longest):
            full = width * (length - 1) + 1
            for nodes in (full, *(n for n in cuts if max(length, full // 3) <= n < full)):
                if width < nodes <= curves.most_rows:
                    found.add(BeamShape(width, length, nodes))
    contexts = (curves.short_context, curves.long_context)
    costs = {s: [curves.step(s, c) for c in contexts] for s in found}

    def better(other: BeamShape, shape: BeamShape) -> bool:
        larger = (
            other.width >= shape.width
            and other.length >= shape.length
            and other.nodes >= shape.nodes
        )
        return (
            other != shape
            and larger
            and all(a <= b for a, b in zip(costs[other], costs[shape], strict=True))
        )

    kept = [s for s in found if not any(better(other, s) for other in found)]
    return tuple(sorted(kept, key=lambda s: (s.nodes, s.length)))
