"""Whether a drafter is better than the one before: by tokens/step on held-out texts, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from redrafter_mlx.config import BeamShape
from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.evaluation.acceptance import measure_quality
from redrafter_mlx.drafting.level_drafter import LevelDrafter

SHAPES = tuple(BeamShape(width, 4) for width in (1, 2, 3, 4))
"""Beam shapes over whose tokens/step the mean is taken."""

MAX_LOSS = 0.02
"""Share of the tokens/step on general texts that may be lost."""


@dataclass(frozen=True)
class Quality:
    """Mean tokens/step over SHAPES: on the user's held-out answers, and on general texts."""

    own: float = 1.0
    general: float | None = None  # None without general texts

    def is_better_than(self, before: Quality) -> bool:
        """Whether it rises on the user's answers, and loses at most MAX_LOSS on general texts."""
        if not self.own > before.own:
            return False
        if self.general is None or before.general is None:
            return True
        return self.general >= (1 - MAX_LOSS) * before.general


@dataclass(frozen=True)
class Judge:
    """Held-out texts with the states that a drafter reads: the user's, and general ones."""

    own: Sequence[Text]
    general: Sequence[Text]

    def quality(self, drafter: LevelDrafter | None) -> Quality:
        """Measure a drafter along the texts; None drafts nothing."""
        if drafter is None:
            return Quality(1.0, 1.0 if self.general else None)
        general = tokens_per_step(drafter, self.general) if self.general else None
        return Quality(tokens_per_step(drafter, self.own), general)


def tokens_per_step(drafter: LevelDrafter, texts: Sequence[Text]) -> float:
    drafts = max(shape.length for shape in SHAPES) - 1
    return fmean(measure_quality(drafter, texts, drafts, SHAPES).tokens_per_step.values())
