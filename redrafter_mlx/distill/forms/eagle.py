"""EAGLE-3, trained on whole texts: see eagle_unrolled.py, and drafting/published/eagle.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np

from redrafter_mlx.config import BeamShape
from redrafter_mlx.distill.corpus.examples import Examples, choose_vocabulary
from redrafter_mlx.distill.corpus.extras import Extras
from redrafter_mlx.distill.corpus.read_texts import ReadTexts
from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.drafter_forms import EagleForm
from redrafter_mlx.distill.evaluation.acceptance import DraftQuality, measure_quality
from redrafter_mlx.distill.forms.eagle_sequences import PADDED, grouped, pad_together
from redrafter_mlx.distill.forms.eagle_unrolled import Sequences, unrolled_logits
from redrafter_mlx.distill.forms.eagle_weights import fresh_network
from redrafter_mlx.distill.forms.form import (
    BatchLoss,
    Recipe,
    Student,
    check_same_form,
    chosen_layers,
    open_start,
)
from redrafter_mlx.distill.forms.loss import distillation_loss
from redrafter_mlx.distill.forms.positions import logits_bytes, ready_to_train
from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.drafting.draft_vocabulary import DraftVocabulary
from redrafter_mlx.drafting.drafter_files import check_trained_for, open_files
from redrafter_mlx.drafting.published.eagle import EAGLE3, EagleDrafter, load_eagle_three
from redrafter_mlx.drafting.published.eagle_config import ROPE_BASE, EagleConfig
from redrafter_mlx.drafting.published.eagle_files import (
    LAYER_CONFIG,
    save_eagle,
    speculators_config,
)
from redrafter_mlx.drafting.published.eagle_network import EagleNetwork, EagleThreeNetwork
from redrafter_mlx.target.fingerprint import trainable_size
from redrafter_mlx.target.model import Target
from redrafter_mlx.weights.raw_model import context_length

_HEAD_SIZE, _QUERIES = 64, (4, 3, 5, 7, 2, 1)
"""Size of an attention head, and the allowed numbers of query heads per key head, best first."""

_POSITIONS = 2048
"""Maximum number of positions of a drafter whose target names no limit."""


@dataclass(frozen=True)
class EagleRecipe(Recipe):
    """The recipe for EAGLE-3 drafters of one configuration.

    target, fingerprint: name and fingerprint of the target
    draft_length:        number of successive drafts
    """

    config: EagleConfig
    target: str
    fingerprint: str
    draft_length: int

    title = "A decoder layer"
    method = "EAGLE-3 ([arXiv 2503.01840](https://arxiv.org/abs/2503.01840))"

    @classmethod
    def of(
        cls, form: EagleForm, target: Target, name: str, fingerprint: str, draft_length: int
    ) -> EagleRecipe:
        """Return the recipe for a target called `name` and `draft_length` successive drafts.

        Raises BadInputError for layers that the target does not have.
        """
        D, V, size = target.hidden_size, target.vocab_size, form.draft_vocab
        layers = _context_layers(form, target.n_layers)
        heads = next(n for n in range(max(1, D // _HEAD_SIZE), 0, -1) if D % n == 0)
        args = getattr(target.model, "args", None)
        longest = None if args is None else context_length(vars(args))
        config = EagleConfig(
            stored=frozenset({"layers.0.hidden_norm.weight"}),
            layers=layers,
            context_size=len(layers) * D,
            hidden_size=D,
            intermediate_size=form.inner_dim or D * 8 // 3,
            heads=heads,
            kv_heads=heads // next(n for n in _QUERIES if heads % n == 0),
            head_size=D // heads,
            n_layers=1,
            output_size=V if size == "all" else min(size, V),
            vocab_size=V,
            own_head=True,
            own_embedding=False,
            norm_eps=1e-5,
            rope_base=ROPE_BASE,
            rope_scaling=None,
            max_positions=longest or _POSITIONS,
            fc_norm=True,
        )
        return cls(config, name, fingerprint, draft_length)

    @property
    def record(self) -> dict[str, object]:
        return {"form": EagleForm.form, **speculators_config(self.config)}

    @property
    def description(self) -> str:
        config = self.config
        read = ", ".join(map(str, config.layers))
        return (
            f"EAGLE-3, a decoder layer of width {config.hidden_size} with {config.heads} heads, "
            f"reads what goes into layers {read} (counted from 0), drafts {config.output_size:,} "
            f"of {config.vocab_size:,} tokens"
        )

    @property
    def context_layers(self) -> tuple[int, ...]:
        return self.config.layers

    @property
    def parameters(self) -> int:
        return trainable_size(EagleThreeNetwork(self.config))

    def step_bytes(self, options: TrainOptions) -> int:
        return PADDED * logits_bytes(options, self.config.output_size)

    def extras(self, read: Sequence[ReadTexts]) -> Extras:
        """Read prompts together with their answers, as whole texts."""
        others = tuple(texts for texts in read if texts.texts is not None)
        return Extras(self.context_layers, others, whole=True)

    def check_start(self, folder: Path) -> None:
        given = open_start(folder, EAGLE3).config
        check_trained_for(given, folder, self.target, self.fingerprint)
        check_same_form(folder, _flat(given), _flat(speculators_config(self.config)))

    def blank(self, target: Target, options: TrainOptions) -> Student:
        V, size = self.config.vocab_size, self.config.output_size
        vocabulary = DraftVocabulary(size, V, mx.arange(size) if size < V else None)
        return EagleStudent(self, EagleThreeNetwork(self.config), vocabulary, target, options)

    def fresh(
        self, target: Target, options: TrainOptions, counts: np.ndarray, texts: Sequence[Text]
    ) -> Student:
        V, size = self.config.vocab_size, self.config.output_size
        tokens = mx.array(choose_vocabulary(counts, size)) if size < V else None
        network = fresh_network(self.config, target, tokens, texts, options.seed)
        ready_to_train(network)
        return EagleStudent(self, network, DraftVocabulary(size, V, tokens), target, options)

    def start(self, folder: Path, target: Target, options: TrainOptions) -> Student:
        drafter = load_eagle_three(open_files(folder), target)
        ready_to_train(drafter.module)
        return EagleStudent(self, drafter.module, drafter.vocabulary, target, options)


class EagleStudent(Student):
    """An EAGLE network in training."""

    def __init__(
        self,
        recipe: EagleRecipe,
        network: EagleNetwork,
        vocabulary: DraftVocabulary,
        target: Target,
        options: TrainOptions,
    ) -> None:
        self._recipe, self._network, self.vocabulary = recipe, network, vocabulary
        self._target, self._options = target, options
        self._outputs = vocabulary.index()
        self._soft = options.soft_share > 0
        self._logits = target.logits_of(vocabulary.tokens)

    @property
    def network(self) -> EagleNetwork:
        return self._network

    def by_adamw(self, name: str) -> bool:
        return name == "lm_head.weight"

    def losses(self, examples: Examples, epoch: int, skip: int) -> Iterator[BatchLoss]:
        at = 0
        for n, texts in enumerate(examples.texts(epoch)):
            for group in grouped(texts, examples.size, f"{examples.seed} {epoch} {n}"):
                at += 1
                if at > skip:
                    yield partial(self.loss, self._padded(group))

    def trial(self) -> BatchLoss:
        size, rng = self._options.batch, np.random.default_rng(0)
        answer, prompt, wide = min(size, 128), 32, self._target.context_size
        tokens = rng.integers(0, self._target.vocab_size, prompt + answer, np.int32)
        states = rng.normal(size=(prompt + answer - 1, wide)).astype(np.float32)
        text = Text.of(
            self._target,
            tokens[:prompt].tolist(),
            tokens[prompt:],
            states[prompt - 1 :],
            prompt_states=states[: prompt - 1],
        )
        return partial(self.loss, self._padded([text] * (size // answer)))

    def evaluate(self, held_out: Sequence[Text], shapes: Sequence[BeamShape]) -> DraftQuality:
        drafter = EagleDrafter(EAGLE3.name, self._network, self._target, self.vocabulary)
        return measure_quality(drafter, held_out, self._options.draft_length, shapes)

    def save(self, folder: Path) -> None:
        recipe = self._recipe
        keys = {"target": recipe.target, "target_fingerprint": recipe.fingerprint}
        save_eagle(self._network, self.vocabulary, folder, recipe.draft_length, keys)

    def loss(self, batch: Sequences) -> mx.array:
        """Return the distillation loss of a batch."""
        options = self._options
        logits = unrolled_logits(
            self._network, self._target.embedding, self._network.lm_head, batch
        )
        return distillation_loss(
            logits,
            batch,
            self._outputs,
            self.teacher(batch) if self._soft else None,
            options.depth_weights,
            options.soft_share,
        )

    def teacher(self, batch: Sequences) -> mx.array:
        """Return the soft labels [M + T, V']: target probabilities after each trained position."""
        states = batch.states.reshape(-1, batch.states.shape[-1])
        rows = mx.pad(batch.rows, (0, batch.labels.shape[1]))
        logits = self._logits(states[rows][None].astype(self._target.dtype))[0]
        return mx.softmax(logits.astype(mx.float32), axis=-1)

    def _padded(self, texts: Sequence[Text]) -> Sequences:
        T, D = self._options.draft_length, self._target.hidden_size
        return pad_together(texts, T, D, prompts=self._soft)


def _context_layers(form: EagleForm, n_layers: int) -> tuple[int, ...]:
    """Return the layers to read; raises BadInputError for a layer that the target does not have."""
    layers = chosen_layers(form.context_layers, n_layers)
    automatic = form.context_layers == "auto"
    return (0, *layers) if automatic and layers[0] == 1 else layers  # see EagleForm


def _flat(config: Mapping[str, object]) -> dict[str, object]:
    """Return the keys of a drafter's config.json, with those of its decoder layer at the top."""
    layer = config.get(LAYER_CONFIG)
    return {**config, LAYER_CONFIG: None, **(layer if isinstance(layer, dict) else {})}
