"""Medusa heads: see drafting/published/medusa.py.

As in the authors' training, each head starts as the target's own prediction of the next token: its
residual block adds nothing at first, and its output matrix is the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from redrafter_mlx.distill.corpus.examples import choose_vocabulary
from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.drafter_forms import MedusaForm
from redrafter_mlx.distill.forms.form import Recipe, Student, check_same_form, open_start
from redrafter_mlx.distill.forms.positions import PositionStudent, logits_bytes, ready_to_train
from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.drafting.drafter_files import check_trained_for, open_files
from redrafter_mlx.drafting.published.medusa import (
    MEDUSA,
    MedusaConfig,
    MedusaDrafter,
    MedusaNetwork,
    load_medusa,
    medusa_config,
    save_medusa,
)
from redrafter_mlx.target.fingerprint import trainable_size
from redrafter_mlx.target.model import Target


@dataclass(frozen=True)
class MedusaRecipe(Recipe):
    """The recipe for Medusa heads of one configuration.

    target, fingerprint: name and fingerprint of the target
    """

    config: MedusaConfig
    target: str
    fingerprint: str

    title = "A set of Medusa heads"
    method = "Medusa ([arXiv 2401.10774](https://arxiv.org/abs/2401.10774))"

    @classmethod
    def of(
        cls, form: MedusaForm, target: Target, name: str, fingerprint: str, draft_length: int
    ) -> MedusaRecipe:
        """Return the recipe for a target called `name`, with one head per draft."""
        V, size = target.vocab_size, form.draft_vocab
        config = MedusaConfig(
            hidden_size=target.hidden_size,
            vocab_size=V,
            heads=draft_length,
            layers=1,
            biases=True,
            outputs="own" if form.head == "own" else "target",
            output_size=V if size == "all" else min(size, V),
        )
        return cls(config, name, fingerprint)

    @property
    def record(self) -> dict[str, object]:
        return {"form": MedusaForm.form, **asdict(self.config)}

    @property
    def description(self) -> str:
        config = self.config
        outputs = "of their own" if config.outputs == "own" else "the model's"
        return (
            f"{config.heads} heads, output matrices {outputs}, drafts {config.output_size:,} of "
            f"{config.vocab_size:,} tokens"
        )

    @property
    def parameters(self) -> int:
        return trainable_size(MedusaNetwork(self.config))

    def step_bytes(self, options: TrainOptions) -> int:
        return logits_bytes(options, self.config.output_size)

    def check_start(self, folder: Path) -> None:
        files, wanted = open_start(folder, MEDUSA), self.config
        check_trained_for(files.config, folder, self.target, self.fingerprint)
        given = medusa_config(files, wanted.hidden_size, wanted.vocab_size)
        check_same_form(folder, asdict(given), asdict(wanted))

    def blank(self, target: Target, options: TrainOptions) -> Student:
        return MedusaStudent(self, MedusaNetwork(self.config), target, options)

    def fresh(
        self, target: Target, options: TrainOptions, counts: np.ndarray, texts: Sequence[Text]
    ) -> Student:
        del texts
        network, config = MedusaNetwork(self.config), self.config
        if config.output_size < config.vocab_size:
            network.token_map = mx.array(choose_vocabulary(counts, config.output_size))
        for head in network.heads:
            for block in head.blocks:
                block.linear.weight = mx.zeros_like(block.linear.weight)
                block.linear.bias = mx.zeros_like(block.linear.bias)
        if config.outputs == "own":
            matrix = output_matrix(target, network.vocabulary.tokens)
            for head in network.heads:
                head.output.weight = matrix
        ready_to_train(network)
        return MedusaStudent(self, network, target, options)

    def start(self, folder: Path, target: Target, options: TrainOptions) -> Student:
        network = load_medusa(open_files(folder), target).module
        ready_to_train(network)
        return MedusaStudent(self, network, target, options)


class MedusaStudent(PositionStudent):
    """Medusa heads in training."""

    def __init__(
        self, recipe: MedusaRecipe, network: MedusaNetwork, target: Target, options: TrainOptions
    ) -> None:
        super().__init__(MedusaDrafter(network, target), target, options)
        self._recipe, self._network = recipe, network

    @property
    def network(self) -> MedusaNetwork:
        return self._network

    def by_adamw(self, name: str) -> bool:
        return name.endswith("output.weight")

    def save(self, folder: Path) -> None:
        name, fingerprint = self._recipe.target, self._recipe.fingerprint
        keys = {"base_model_name_or_path": name, "target": name, "target_fingerprint": fingerprint}
        save_medusa(self._network, folder, keys)


def output_matrix(target: Target, tokens: mx.array | None) -> mx.array:
    """Return the target's output layer, with its scaling, as a matrix [V', D].

    It is dequantised and without bias. Soft caps are ignored, since they hardly change the logits
    of unit vectors.
    """
    logits, D = target.logits_of(tokens), target.hidden_size
    unit, nothing = mx.eye(D, dtype=target.dtype), mx.zeros((1, D), target.dtype)
    return (logits(unit[None]) - logits(nothing[None]))[0].T
