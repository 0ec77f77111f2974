"""Drafters that remember the text, trained on whole texts; see eagle_sequences.py."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

import mlx.core as mx

from redrafter_mlx.distill.corpus.examples import Examples
from redrafter_mlx.distill.corpus.extras import Extras
from redrafter_mlx.distill.corpus.read_texts import ReadTexts
from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.forms.eagle_sequences import (
    PADDED,
    Sequences,
    group_lengths,
    grouped,
    pad_together,
    unrolled_logits,
)
from redrafter_mlx.distill.forms.form import BatchLoss, Recipe, Student
from redrafter_mlx.distill.options import TrainOptions


class WholeTextRecipe(Recipe):
    """The recipe of a drafter that is trained on prompts together with their answers."""

    def step_bytes(self, options: TrainOptions) -> int:
        return PADDED * super().step_bytes(options)

    def extras(self, read: Sequence[ReadTexts]) -> Extras:
        """Read prompts together with their answers, as whole texts."""
        others = tuple(texts for texts in read if texts.texts is not None)
        return Extras(self.context_layers, others, whole=True)


class WholeTextStudent(Student):
    """A drafter in training that reads every position of a text."""

    def losses(self, examples: Examples, epoch: int, skip: int) -> Iterator[BatchLoss]:
        groups = (
            group
            for n, texts in enumerate(examples.texts(epoch))
            for group in grouped(texts, self.options.batch, f"{self.options.seed} {epoch} {n}")
        )
        for group in islice(groups, skip, None):
            yield partial(self.loss, self.batch(group))

    def batches(self, examples: Examples) -> float:
        size, seed = self.options.batch, str(self.options.seed)
        return sum(len(group_lengths(some, size, seed)) for some in examples.lengths(epoch=0))

    def batch(self, texts: Sequence[Text]) -> Sequences:
        T, D = self.options.draft_length, self._target.hidden_size
        return pad_together(texts, T, D, prompts=self.options.soft_share > 0)


class UnrolledStudent(WholeTextStudent):
    """A network of a `FeatureDrafter`, which reads its own output at later depths."""

    @abstractmethod
    def head(self, hidden: mx.array) -> mx.array:
        """Map outputs of the network [M, H] after its norm to logits [M, V']."""

    def drafts(self, batch: Sequences) -> Iterator[mx.array]:
        return unrolled_logits(self.network, self._target.embedding, self.head, batch)
