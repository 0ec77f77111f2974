"""A drafter's logits and accepted drafts along texts."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx

from redrafter_mlx.distill.corpus.examples import Batch
from redrafter_mlx.distill.evaluation.acceptance import draft_logits
from redrafter_mlx.drafting.level_drafter import MemorylessDrafter


def logits_along(drafter: MemorylessDrafter, batch: Batch) -> Iterator[mx.array]:
    """Yield the drafter's logits [P, V'] after a batch's roots and labels, depth by depth."""
    P, T = batch.labels.shape
    levels = drafter.levels_of(batch.states[:P].astype(mx.float32), batch.roots, T)
    return draft_logits(levels, batch.labels)
