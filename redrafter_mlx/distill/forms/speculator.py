"""MLP speculators: see drafting/published/mlp_speculator.py.

Their paper (arXiv 2404.19124) trains them in two stages, on plain text and then on the target's own
answers. Here these are two runs, the second of which starts from the first (docs/training.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_unflatten

from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.drafter_forms import SpeculatorForm
from redrafter_mlx.distill.forms.form import Recipe, Student, check_same_form, open_start
from redrafter_mlx.distill.forms.positions import PositionStudent, logits_bytes, ready_to_train
from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.drafting.drafter_files import check_trained_for, open_files, parameters_of
from redrafter_mlx.drafting.published.mlp_speculator import (
    MLP_SPECULATOR,
    SpeculatorConfig,
    SpeculatorDrafter,
    SpeculatorNetwork,
    load_speculator,
    save_speculator,
    speculator_config,
)
from redrafter_mlx.target.fingerprint import trainable_size
from redrafter_mlx.target.model import Target


@dataclass(frozen=True)
class SpeculatorRecipe(Recipe):
    """The recipe for MLP speculators of one configuration.

    target, fingerprint: name and fingerprint of the target
    """

    config: SpeculatorConfig
    target: str
    fingerprint: str

    title = "An MLP speculator"
    method = "the MLP speculator's ([arXiv 2404.19124](https://arxiv.org/abs/2404.19124))"

    @classmethod
    def of(
        cls, form: SpeculatorForm, target: Target, name: str, fingerprint: str, draft_length: int
    ) -> SpeculatorRecipe:
        """Return the recipe for a target called `name`, with one head per draft."""
        config = SpeculatorConfig(
            hidden_size=target.hidden_size,
            inner_size=form.inner_dim or target.hidden_size,
            vocab_size=target.vocab_size,
            heads=draft_length,
            tie_weights=form.tie_weights,
            scale_input=form.scale_input,
        )
        return cls(config, name, fingerprint)

    @property
    def record(self) -> dict[str, object]:
        return {"form": SpeculatorForm.form, **asdict(self.config)}

    @property
    def description(self) -> str:
        config = self.config
        tied = "weights tied" if config.tie_weights else "weights of their own"
        return f"{config.heads} heads of width {config.inner_size}, {tied}"

    @property
    def parameters(self) -> int:
        return trainable_size(SpeculatorNetwork(self.config))

    def step_bytes(self, options: TrainOptions) -> int:
        return logits_bytes(options, self.config.vocab_size)

    def check_start(self, folder: Path) -> None:
        files = open_start(folder, MLP_SPECULATOR)
        check_trained_for(files.config, folder, self.target, self.fingerprint)
        check_same_form(folder, asdict(speculator_config(files)), asdict(self.config))

    def blank(self, target: Target, options: TrainOptions) -> Student:
        return SpeculatorStudent(self, SpeculatorNetwork(self.config), target, options)

    def fresh(
        self, target: Target, options: TrainOptions, counts: np.ndarray, texts: Sequence[Text]
    ) -> Student:
        del counts, texts
        network = SpeculatorNetwork(self.config)
        spread = self.config.inner_size**-0.5
        matrices = {n: a.shape for n, a in parameters_of(network).items() if a.ndim == 2}
        keys = mx.random.split(mx.random.key(options.seed), len(matrices))
        network.update(
            tree_unflatten(
                [
                    (name, spread * mx.random.normal(shape, key=key))
                    for (name, shape), key in zip(sorted(matrices.items()), keys, strict=True)
                ]
            )
        )
        ready_to_train(network)
        return SpeculatorStudent(self, network, target, options)

    def start(self, folder: Path, target: Target, options: TrainOptions) -> Student:
        network = load_speculator(open_files(folder), target).module
        ready_to_train(network)
        return SpeculatorStudent(self, network, target, options)


class SpeculatorStudent(PositionStudent):
    """An MLP speculator in training."""

    def __init__(
        self,
        recipe: SpeculatorRecipe,
        network: SpeculatorNetwork,
        target: Target,
        options: TrainOptions,
    ) -> None:
        super().__init__(SpeculatorDrafter(network, target), target, options)
        self._recipe, self._network = recipe, network

    @property
    def network(self) -> SpeculatorNetwork:
        return self._network

    def by_adamw(self, name: str) -> bool:
        return name.startswith(("emb.", "head."))

    def save(self, folder: Path) -> None:
        keys = {"target": self._recipe.target, "target_fingerprint": self._recipe.fingerprint}
        save_speculator(self._network, folder, keys)
