"""MLP speculators: see drafting/published/heads/mlp_speculator.py.

Their paper (arXiv 2404.19124) trains them in two stages, on plain text and then on the target's
own answers. Here these are two runs, the second of which starts from the first
(docs/guides/training.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Self

import numpy as np

from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.drafter_forms import SpeculatorForm
from redrafter_mlx.distill.forms.form import Student
from redrafter_mlx.distill.forms.fresh_weights import draw_matrices
from redrafter_mlx.distill.forms.students import PositionRecipe
from redrafter_mlx.drafting.files.drafter_files import DrafterFiles
from redrafter_mlx.drafting.published.heads.mlp_speculator import (
    MLP_SPECULATOR,
    SpeculatorConfig,
    SpeculatorDrafter,
    SpeculatorNetwork,
    save_speculator,
    speculator_config,
)
from redrafter_mlx.target_model.model import Target


class SpeculatorRecipe(PositionRecipe):
    """The recipe for MLP speculators, with one head for each draft."""

    config: SpeculatorConfig
    options = SpeculatorForm
    title = "An MLP speculator"
    method = "the MLP speculator's ([arXiv 2404.19124](https://arxiv.org/abs/2404.19124))"
    published = MLP_SPECULATOR

    @classmethod
    def of(
        cls, form: SpeculatorForm, target: Target, name: str, fingerprint: str, draft_length: int
    ) -> Self:
        config = SpeculatorConfig(
            hidden_size=target.hidden_size,
            inner_size=form.inner_dim or target.hidden_size,
            vocab_size=target.vocab_size,
            heads=draft_length,
            tie_weights=form.tie_weights,
            scale_input=form.scale_input,
        )
        return cls(config, name, fingerprint)

    @classmethod
    def of_files(cls, files: DrafterFiles, target: Target, name: str, fingerprint: str) -> Self:
        del target
        return cls(speculator_config(files), name, fingerprint)

    @property
    def drafts(self) -> int:
        return self.config.heads

    @property
    def record(self) -> dict[str, object]:
        return {"form": SpeculatorForm.form, **asdict(self.config)}

    @property
    def description(self) -> str:
        config = self.config
        tied = "weights tied" if config.tie_weights else "weights of their own"
        return f"{config.heads} heads of width {config.inner_size}, {tied}"

    @property
    def output_size(self) -> int:
        return self.config.vocab_size

    def network(self) -> SpeculatorNetwork:
        return SpeculatorNetwork(self.config)

    def bind(self, network: SpeculatorNetwork, target: Target) -> SpeculatorDrafter:
        return SpeculatorDrafter(network, target)

    def fresh(
        self, target: Target, counts: np.ndarray, texts: Sequence[Text], seed: int
    ) -> SpeculatorDrafter:
        del counts, texts
        network = self.network()
        draw_matrices(network, seed, lambda _: self.config.inner_size**-0.5)
        return self.bind(network, target)

    def compared(self, files: DrafterFiles) -> tuple[Mapping[str, object], Mapping[str, object]]:
        return asdict(speculator_config(files)), asdict(self.config)

    def by_adamw(self, name: str) -> bool:
        return name.startswith(("emb.", "head."))

    def save(self, student: Student, folder: Path) -> None:
        save_speculator(student.network, folder, self.target_keys)
