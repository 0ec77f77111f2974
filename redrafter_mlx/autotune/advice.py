"""What drafts would bring on a machine, from its measured times and the acceptance of a kind.

A chain of drafts is assumed. A tree brings more, and is chosen step by step once there is a
drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from redrafter_mlx.autotune.candidates import LENGTHS
from redrafter_mlx.autotune.cost_model import LEVEL_COST, CostModel
from redrafter_mlx.config import PLAIN


@dataclass(frozen=True)
class Kind:
    """Drafters of a kind, as they usually fare in chats.

    chances:    by depth, that a draft is accepted where those before it were; the last one goes on
    level_cost: of drafting one token, as a share of the target's one-row call
    share:      of the steps, those that draft at all
    """

    chances: tuple[float, ...]
    level_cost: float
    share: float = 1.0


NOTHING = Kind((0.0,), level_cost=0.0)
"""Plain decoding."""

LOOKUP = Kind((0.62, 0.8), level_cost=0.0, share=0.25)
"""1.38 tokens/step: MT-Bench and questions that ask for quotations, docs/benchmarks.md."""

TRAINED = Kind((0.52, 0.56), level_cost=LEVEL_COST)
"""1.98 tokens/step at width 1 and length 4: the drafter that ships, on our questions, README.md."""

_PUBLISHED = (0.68, 0.68)
"""Assumed of an EAGLE-3 head: 2.5 tokens/step for a chain of three drafts. Its paper
(arXiv 2503.01840) has 4 to 6 in trees of 60 nodes."""


def published(drafter_bytes: int, weight_bytes: int) -> Kind:
    """A published head that reads so many bytes for a draft, beside the target's weights."""
    return Kind(_PUBLISHED, level_cost=drafter_bytes / max(1, weight_bytes))


@dataclass(frozen=True)
class Promise:
    """What a kind of drafter promises: its best length, 1 where plain decoding is faster."""

    length: int
    tokens_per_step: float
    tokens_per_second: float
    speedup: float


def promise(
    kind: Kind, costs: CostModel, context: int, lengths: Sequence[int] = (1, *LENGTHS)
) -> Promise:
    """The length of most tokens a second after so many tokens of text."""
    plain = costs.step(PLAIN, context)

    def of_length(length: int) -> Promise:
        if length == 1:
            return Promise(1, 1.0, 1 / plain, 1.0)
        tokens, reached = 1.0, kind.share
        for depth in range(length - 1):
            reached *= kind.chances[min(depth, len(kind.chances) - 1)]
            tokens += reached
        drafting = (length - 1) * kind.level_cost * costs.verify(1, costs.short_context)
        drafted = costs.verify(length, context) + drafting + costs.chain_overhead
        seconds = kind.share * drafted + (1 - kind.share) * plain
        return Promise(length, tokens, tokens / seconds, tokens / seconds * plain)

    return max(map(of_length, lengths), key=lambda found: found.speedup)
