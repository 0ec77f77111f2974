"""A drafter's logits and accepted drafts along texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np

from redrafter_mlx.config import BeamShape
from redrafter_mlx.distill.corpus.examples import Batch
from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.evaluation.acceptance import accepted_lengths, draft_logits, roots_along
from redrafter_mlx.drafting.level_drafter import LevelDrafter, MemorylessDrafter


def never_counted() -> np.ndarray:
    """Stand for the counts of a corpus's tokens, where nothing may depend on them."""
    raise AssertionError("the tokens were counted")


def logits_along(drafter: MemorylessDrafter, batch: Batch) -> Iterator[mx.array]:
    """Yield the drafter's logits [P, V'] after a batch's roots and labels, depth by depth."""
    P, T = batch.labels.shape
    levels = drafter.levels_of(batch.states[:P].astype(mx.float32), batch.roots, T)
    return draft_logits(levels, batch.labels)


def accepted_along(drafter: LevelDrafter, texts: Sequence[Text], shape: BeamShape) -> np.ndarray:
    """Return [M] int: how many drafts the target would accept after each answer token of texts."""
    shape = drafter.drafted(shape)
    roots = roots_along(drafter, texts, shape.length - 1)
    return np.concatenate([accepted_lengths(some, shape) for some in roots])
