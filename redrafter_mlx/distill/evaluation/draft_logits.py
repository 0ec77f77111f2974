"""The drafter's teacher-forced logits along texts: each draft is fed with the labels before it."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx

from redrafter_mlx.distill.corpus.examples import Batch
from redrafter_mlx.drafting.interface import Seen
from redrafter_mlx.drafting.level_drafter import DraftLevels, LevelDrafter


def levels_along(drafter: LevelDrafter, batch: Batch, drafts: int) -> DraftLevels:
    """Return the draft levels of a drafter without memory after the roots [P], in float32."""
    roots = batch.roots
    once = mx.ones_like(roots)
    states = batch.states[: roots.shape[0], None].astype(mx.float32)
    seen = Seen(mx.stack([0 * once, roots], axis=1), states, 0 * once, once, bound=1)
    return drafter.levels((), seen, drafts)


def draft_logits(levels: DraftLevels, labels: mx.array) -> Iterator[mx.array]:
    """Yield logits [P, V'] float32 of the tokens at `labels` [P, T], depth by depth."""
    parents = mx.zeros((labels.shape[0], 1), mx.int32)
    yield levels.first()[:, 0]
    for depth in range(1, labels.shape[1]):
        yield levels.following(parents, labels[:, depth - 1 : depth])[:, 0]
