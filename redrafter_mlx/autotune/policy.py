"""Which beam shape to draft with next: the one that promises the most tokens per second.

Expected tokens come from the odds of acceptance, seconds from the cost curves. Plain decoding is
one of the shapes. A shape is chosen once enough steps have told of it. Others that seem to promise
more are tried, and what trying costs is bounded: each try must have been saved up for, as a small
share of the time spent, and what it gains is paid back, so that a try which succeeds is followed
by another at once.

Copies of the text (prompt lookup) are weighed anew at every step, by how long the match is.

Everything here is arithmetic on the host with what earlier steps have reported.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

from redrafter_mlx.autotune.acceptance import Odds, Verified
from redrafter_mlx.autotune.cost_model import CostCurves
from redrafter_mlx.config import MAX_BEAM_LENGTH, PLAIN, BeamShape
from redrafter_mlx.decoding.copies import CopyPlan
from redrafter_mlx.drafting.prompt_lookup import Copy, TextIndex

WIDEST = 4
LENGTHS = (2, 3, 4, 5, 6, 8)
"""Shapes beyond these are not tried by themselves."""

_CAPACITIES = (6, 8, 10, 13, 16, 20, 24, 28)
"""Row counts to which trees are cut on every machine; those before its cliffs come to them."""

_STAY = 0.01
"""Another shape must promise so much more than the one in use."""

_ENOUGH = 4.0
"""So many steps must have told of a shape before it is chosen without being tried."""

_TRY_SHARE = 0.015
"""Of the time spent, how much is saved up for trying what may turn out slower; with what else
trying costs, such as a change that was for the worse, it is 2% at most."""

_MOST_TRIES = 3
"""Tries that can be saved up: one that misses does not end a row of them."""

_CONTEXT_STEP = 64
"""Costs are looked up again after so many tokens."""

_COPIED = (1, 3, 7, 15, 31)
"""Lengths of copies, in few steps because each row count is a compiled graph of its own."""

_LONG_MATCH = 8
"""Shorter matches are copied for twice their length at most, however well others have held."""

_REBUILD = 0.2
"""Of a plain step, what the host takes to build a verification anew for copies. With `_UNFUSED` it
makes 8 rows of a copy cost 2.2 steps of two rows on two CPU cores; counted: 1.8 to 3."""

_UNFUSED = 1.15
"""What a call that is not compiled takes, of one that is."""

_WORTH_IT = 0.1
"""Tokens that a copy must promise more than the tree as it was drafted."""

_BESIDE = 0.7
"""How good a drafter's branches are where the copy beside them is wrong, as a share of how good
they are otherwise. Assumed: both tend to fail at the same places."""


class ShapePolicy:
    """The shapes of one answer, step by step.

    odds: what was learned so far
    """

    def __init__(self, curves: CostCurves, odds: Odds | None = None) -> None:
        """`odds` to begin with, which are learned on; their shapes are those to choose from."""
        self._curves = curves
        self.odds = Odds(candidates(curves)) if odds is None else odds
        self._context = -1
        self._costs: dict[BeamShape, float] = {}
        self._tokens: dict[BeamShape, float] = {}
        self._best = self._promising = PLAIN
        self._tried: deque[BeamShape] = deque()
        self._copied: deque[float] = deque()  # what was expected of each copy under way
        self._savings = math.inf  # for what seems to pay: as many tries as can be saved up
        self._stale = True

    def next_shape(self, length: int) -> BeamShape:
        """The shape to draft with after `length` tokens."""
        self._look_up_costs(length)
        if self._stale:
            self._choose()
        if self._promising == self._best:
            return self._best
        price = self._costs[self._promising] - self._costs[self._best]
        saved = self._savings + _TRY_SHARE * self._costs[self._best]
        self._savings = min(saved, _MOST_TRIES * max(price, 0.0))
        if self._savings < price:
            return self._best
        self._savings -= price
        self._tried.append(self._promising)
        return self._promising

    def plan_copies(self, index: TextIndex, drafted: BeamShape, drawn: bool) -> CopyPlan | None:
        """The copy whose verification gains most time over the tree as it was drafted."""
        found = index.copies(1, min(MAX_BEAM_LENGTH, self._curves.most_rows) - 1)
        if not found:
            return None
        pace, context = self._pace(self._best), self._context * _CONTEXT_STEP
        drafting = 0.0 if drafted == PLAIN else self._drafting(drafted)
        best = self._expected(drafted) - pace * (self._curves.step(drafted, context) - drafting)
        best += _WORTH_IT
        chosen: CopyPlan | None = None
        for tokens, seconds, plan in self._copy_plans(found[0], drafted, drawn, context):
            if tokens - pace * seconds > best:
                best, chosen = tokens - pace * seconds, plan
        if chosen is not None:
            self._copied.append(chosen.copies[0].expected)
        return chosen

    def _copy_plans(
        self, copy: Copy, drafted: BeamShape, drawn: bool, context: int
    ) -> Iterator[tuple[float, float, CopyPlan]]:
        """Expected tokens and seconds of each way to verify a copy."""
        curves, rebuild = self._curves, _REBUILD * self._costs[PLAIN]
        trust = min(self.odds.copies_trust, 1.0)
        holds = [trust * math.exp(p) for p in copy.log_probs]
        reach = [] if drafted == PLAIN or drawn else self.odds.reach(drafted)
        short = 2 * copy.matched if copy.matched < _LONG_MATCH else len(holds)
        for count in (n for n in _COPIED if n <= min(short, len(holds))):
            cut = Copy(copy.tokens[:count], copy.log_probs[:count], copy.matched)
            cost = _UNFUSED * curves.verify(count + 1, context) + curves.chain_rest + rebuild
            after = self._draft_after(holds[count - 1], context)
            alone = CopyPlan([cut], BeamShape(1, count + 1), False, after)
            yield 1 + sum(holds[:count]), cost, alone
            if not reach or drafted.nodes + count > curves.most_rows:
                continue
            width, length = drafted.width + 1, max(drafted.length, count + 1)
            shape = BeamShape(width, length, drafted.nodes + count)
            # The path of a tree with branches is put in place by the step after it.
            call = _UNFUSED * curves.verify(shape.nodes, context)
            cost = call + curves.drafted_rest + 2 * rebuild
            yield 1 + _beside(holds[:count], reach), cost, CopyPlan([cut], shape, True)

    def learn(self, step: Verified) -> None:
        """Take note of a step that was read; they may come some steps late."""
        if step.copied:
            self.odds.learn_copies(self._copied.popleft(), len(step.path) - 1)
            return
        if step.shape.length == 1:
            self.odds.rest()
            return
        if step.shape in self._tried:
            while self._tried.popleft() != step.shape:
                pass  # those before it gave way to copies
            gained = len(step.path) - self._expected(self._best)
            self._savings += gained / self._pace(self._best)
        self.odds.learn(step)
        self._stale = True

    def rates(self, length: int) -> dict[BeamShape, float]:
        """Tokens a second that each shape promises after `length` tokens."""
        self._look_up_costs(length)
        self._tokens = self.odds.tokens()
        return {shape: self._pace(shape) for shape in (PLAIN, *self.odds.shapes)}

    def _choose(self) -> None:
        """The best shape among those that are known well enough, and of the others a better one."""
        self._stale = False
        self._tokens = self.odds.tokens()
        known = [PLAIN, *(s for s in self.odds.shapes if self.odds.seen(s) >= _ENOUGH)]
        if self._best not in known:
            self._best = PLAIN
        best = max(known, key=self._pace)
        if self._pace(best) > self._pace(self._best) * (1 + _STAY):
            self._best = best
        self._promising = max((self._best, *self.odds.shapes), key=self._pace)
        if self._pace(self._promising) <= self._pace(self._best) * (1 + _STAY):
            self._promising = self._best
        if self._best == self._promising == PLAIN:  # drafting may have begun to pay
            self._promising = min(self.odds.shapes, key=lambda s: self._costs[s], default=PLAIN)
            self._savings = 0.0 if self._savings == math.inf else self._savings

    def _expected(self, shape: BeamShape) -> float:
        """Tokens of a step; a shape that is no candidate counts as plain."""
        return self._tokens.get(shape, 1.0)

    def _pace(self, shape: BeamShape) -> float:
        """Tokens a second."""
        return self._expected(shape) / self._costs[shape]

    def _drafting(self, shape: BeamShape) -> float:
        return self._curves.drafting(shape.width, shape.length)

    def _draft_after(self, holds: float, context: int) -> bool:
        """Whether to draft for the step after a copy that holds throughout with that chance.

        If it does, the match is longer and the next step copies again: the drafts are in vain.
        """
        if self._best == PLAIN:
            return True  # nothing is drafted anyhow, or it is a try, which was paid for
        drafting, pace = self._drafting(self._best), self._pace(self._best)
        dearer = self._curves.step(self._best, context) - drafting - self._costs[PLAIN]
        gain = self._expected(self._best) - 1 - pace * dearer
        return (1 - holds) * gain > pace * drafting

    def _look_up_costs(self, length: int) -> None:
        context = length // _CONTEXT_STEP
        if context == self._context:
            return
        self._context = context
        self._costs = {s: self._curves.step(s, length) for s in (PLAIN, *self.odds.shapes)}
        self._stale = True


def _beside(holds: list[float], reach: list[float]) -> float:
    """Expected accepted drafts of a copy and the drafter's branches in one tree."""
    depth = max(len(holds), len(reach))
    copied = [*holds, *[0.0] * (depth - len(holds))]
    drafted = [*reach, *[0.0] * (depth - len(reach))]
    return sum(c + (1 - c) * _BESIDE * d for c, d in zip(copied, drafted, strict=True))


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
