"""Training common to the forms without memory: they are trained position by position."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import mlx.core as mx

from redrafter_mlx.distill.corpus.examples import Batch, Examples
from redrafter_mlx.distill.evaluation.acceptance import draft_logits
from redrafter_mlx.distill.forms.form import BatchLoss, Recipe, Student
from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.drafting.level_drafter import MemorylessDrafter
from redrafter_mlx.target_model.model import Target


class PositionRecipe(Recipe):
    """A recipe for drafters without memory."""

    def student(
        self, drafter: MemorylessDrafter, target: Target, options: TrainOptions
    ) -> PositionStudent:
        return PositionStudent(self, drafter, target, options)


class PositionStudent(Student):
    """A student that drafts `draft_length` tokens at each position, fed with the labels before."""

    def __init__(
        self, recipe: Recipe, drafter: MemorylessDrafter, target: Target, options: TrainOptions
    ) -> None:
        super().__init__(recipe, drafter, target, options)
        self._drafter = drafter

    @property
    def drafter(self) -> MemorylessDrafter:
        return self._drafter

    def losses(self, examples: Examples, epoch: int, skip: int) -> Iterator[BatchLoss]:
        for batch in examples.epoch(epoch, skip):
            yield partial(self.loss, batch)

    def batches(self, examples: Examples) -> float:
        return examples.positions / self.options.batch

    def drafts(self, batch: Batch) -> Iterator[mx.array]:
        states = batch.states[: len(batch.roots)].astype(mx.float32)
        levels = self._drafter.levels_of(states, batch.roots, self.options.draft_length)
        return draft_logits(levels, batch.labels)
