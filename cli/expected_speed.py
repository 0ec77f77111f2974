"""The speedup to expect from a kind of drafter, from measured times and typical acceptance rates.

A chain of drafts is assumed. A tree brings more; once there is a drafter, its shape is chosen step
by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from redrafter_mlx.config import PLAIN
from redrafter_mlx.drafting.interface import LEVEL_COST
from redrafter_mlx.tuning.cost import LENGTHS, CostModel


@dataclass(frozen=True)
class Kind:
    """A kind of drafter, with its usual acceptance rates in chats.

    chances:    by depth, the chance that a draft is accepted if those before it were; the last one
                holds for all further depths
    level_cost: cost of drafting one token, as a share of the target's one-row call
    share:      share of the steps that draft at all
    """

    chances: tuple[float, ...]
    level_cost: float
    share: float = 1.0


NOTHING = Kind((0.0,), level_cost=0.0)
"""Plain decoding."""

LOOKUP = Kind((0.62, 0.8), level_cost=0.0, share=0.25)
"""1.38 tokens/step: MT-Bench and questions that ask for quotations, docs/lab/benchmarks.md."""

TRAINED = Kind((0.52, 0.56), level_cost=LEVEL_COST)
"""1.98 tokens/step at width 1 and length 4: the drafter that ships, on our questions, README.md."""

_PUBLISHED = (0.68, 0.68)
"""Assumed for an EAGLE-3 head: 2.5 tokens/step for a chain of three drafts. Its paper
(arXiv 2503.01840) reports 4 to 6 for trees of 60 nodes."""


def published(drafter_bytes: int, weight_bytes: int) -> Kind:
    """Return a published head that reads `drafter_bytes` per draft; the target `weight_bytes`."""
    return Kind(_PUBLISHED, level_cost=drafter_bytes / max(1, weight_bytes))


@dataclass(frozen=True)
class ExpectedSpeed:
    """Expected speed of a kind of drafter at its best length, 1 if plain decoding is faster."""

    length: int
    tokens_per_step: float
    tokens_per_second: float
    speedup: float


def expected_speed(
    kind: Kind, costs: CostModel, context: int, lengths: Sequence[int] = (1, *LENGTHS)
) -> ExpectedSpeed:
    """Return the length with the most tokens per second after `context` tokens of text."""
    plain = costs.step(PLAIN, context)

    def of_length(length: int) -> ExpectedSpeed:
        if length == 1:
            return ExpectedSpeed(1, 1.0, 1 / plain, 1.0)
        tokens, reached = 1.0, kind.share
        for depth in range(length - 1):
            reached *= kind.chances[min(depth, len(kind.chances) - 1)]
            tokens += reached
        drafting = (length - 1) * kind.level_cost * costs.verify(1, costs.short_context)
        drafted = costs.verify(length, context) + drafting + costs.chain_overhead
        seconds = kind.share * drafted + (1 - kind.share) * plain
        return ExpectedSpeed(length, tokens, tokens / seconds, tokens / seconds * plain)

    return max(map(of_length, lengths), key=lambda found: found.speedup)
