"""How drafters are trained: position by position without a memory, or else along whole texts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import mlx.core as mx
import numpy as np

from redrafter_mlx.distill.corpus.examples import Batch, Examples
from redrafter_mlx.distill.corpus.extras import Extras
from redrafter_mlx.distill.corpus.read_texts import ReadTexts
from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.evaluation.acceptance import draft_logits
from redrafter_mlx.distill.forms.eagle_sequences import (
    PADDED,
    Sequences,
    group_lengths,
    grouped,
    pad_together,
    unrolled_logits,
)
from redrafter_mlx.distill.forms.form import BatchLoss, Recipe, Student
from redrafter_mlx.distill.forms.fresh_weights import (
    SPREAD,
    draw_matrices,
    last_part,
    logit_rms,
    output_matrix,
)
from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.drafting.files.drafter_files import DrafterFiles
from redrafter_mlx.drafting.level_drafter import LevelDrafter, MemorylessDrafter
from redrafter_mlx.drafting.published.heads.eagle_files import LAYER_CONFIG
from redrafter_mlx.speculation.draft_vocabulary import DraftVocabulary, choose_vocabulary
from redrafter_mlx.target_model.model import Target


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


class PositionRecipe(Recipe):
    """A recipe for drafters without memory."""

    student_class = PositionStudent


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


class WholeTextRecipe(Recipe):
    """The recipe of a drafter that is trained on prompts together with their answers."""

    def step_bytes(self, options: TrainOptions) -> int:
        return PADDED * super().step_bytes(options)

    def extras(self, read: Sequence[ReadTexts]) -> Extras:
        """Read prompts together with their answers, as whole texts."""
        others = tuple(texts for texts in read if texts.texts is not None)
        return Extras(self.context_layers, others, whole=True)


class LayerRecipe(WholeTextRecipe):
    """The recipe of decoder layers over a draft vocabulary, in the layout of `speculators`."""

    @property
    @abstractmethod
    def stored_config(self) -> Mapping[str, object]:
        """The configuration as config.json has it."""

    @abstractmethod
    def begin(self, network: Any, inputs: np.ndarray) -> None:
        """Let a fresh network begin with its `inputs` [M, context_size], scaled to unit size.

        A target's hidden states have a few coordinates far larger than the rest, which would drown
        the others.
        """

    @abstractmethod
    def bind(
        self, network: Any, target: Target, vocabulary: DraftVocabulary | None = None
    ) -> LevelDrafter: ...

    @property
    def record(self) -> dict[str, object]:
        return {"form": self.options.form, **self.stored_config}

    @property
    def context_layers(self) -> tuple[int, ...]:
        layers: tuple[int, ...] = self.config.layers
        return layers

    def vocabulary(self, tokens: mx.array | None = None) -> DraftVocabulary:
        """Return the tokens that are drafted; without `tokens` [V'] the first ones."""
        V, size = self.config.vocab_size, self.output_size
        if tokens is None and size < V:
            tokens = mx.arange(size)
        return DraftVocabulary(size, V, tokens)

    def fresh(
        self, target: Target, counts: np.ndarray, texts: Sequence[Text], seed: int
    ) -> LevelDrafter:
        """Return an untrained drafter: its context is the last of the layers that it reads."""
        config, network, size = self.config, self.network(), self.output_size
        tokens = mx.array(choose_vocabulary(counts, size)) if size < config.vocab_size else None
        draw_matrices(network, seed, lambda shape: shape[1] ** -0.5)
        network.fc.weight = last_part(config.context_size, config.hidden_size)
        inputs = np.concatenate([text.whole_states for text in texts])
        self.begin(network, inputs[:, : config.context_size])
        if config.own_head:
            network.lm_head.weight = output_matrix(target, tokens)
        network.norm.weight = mx.full((config.hidden_size,), SPREAD / logit_rms(target, tokens))
        return self.bind(network, target, self.vocabulary(tokens))

    def compared(self, files: DrafterFiles) -> tuple[Mapping[str, object], Mapping[str, object]]:
        return _flat(files.config), _flat(self.stored_config)


def _flat(config: Mapping[str, object]) -> dict[str, object]:
    """Return the keys of a drafter's config.json, with those of its decoder layer at the top."""
    layer = config.get(LAYER_CONFIG)
    return {**config, LAYER_CONFIG: None, **(layer if isinstance(layer, dict) else {})}
