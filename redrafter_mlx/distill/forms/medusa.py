"""Medusa heads: see drafting/published/heads/medusa.py.

As in the authors' training, each head starts as the target's own prediction of the next token: its
residual block adds nothing at first, and its output matrix is the target's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Self

import mlx.core as mx
import numpy as np

from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.drafter_forms import MedusaForm
from redrafter_mlx.distill.forms.form import Student
from redrafter_mlx.distill.forms.fresh_weights import output_matrix
from redrafter_mlx.distill.forms.students import PositionRecipe
from redrafter_mlx.drafting.files.drafter_files import DrafterFiles
from redrafter_mlx.drafting.published.heads.medusa import (
    MEDUSA,
    MedusaConfig,
    MedusaDrafter,
    MedusaNetwork,
    medusa_config,
    save_medusa,
)
from redrafter_mlx.speculation.draft_vocabulary import choose_vocabulary
from redrafter_mlx.target_model.model import Target


class MedusaRecipe(PositionRecipe):
    """The recipe for Medusa heads, one for each draft."""

    config: MedusaConfig
    options = MedusaForm
    title = "A set of Medusa heads"
    method = "Medusa ([arXiv 2401.10774](https://arxiv.org/abs/2401.10774))"
    published = MEDUSA

    @classmethod
    def of(
        cls, form: MedusaForm, target: Target, name: str, fingerprint: str, draft_length: int
    ) -> Self:
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

    @classmethod
    def of_files(cls, files: DrafterFiles, target: Target, name: str, fingerprint: str) -> Self:
        config = medusa_config(files, target.hidden_size, target.vocab_size)
        return cls(config, name, fingerprint)

    @property
    def drafts(self) -> int:
        return self.config.heads

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

    def network(self) -> MedusaNetwork:
        return MedusaNetwork(self.config)

    def bind(self, network: MedusaNetwork, target: Target) -> MedusaDrafter:
        return MedusaDrafter(network, target)

    def fresh(
        self, target: Target, counts: np.ndarray, texts: Sequence[Text], seed: int
    ) -> MedusaDrafter:
        del texts, seed
        network, config = self.network(), self.config
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
        return self.bind(network, target)

    def compared(self, files: DrafterFiles) -> tuple[Mapping[str, object], Mapping[str, object]]:
        given = medusa_config(files, self.config.hidden_size, self.config.vocab_size)
        return asdict(given), asdict(self.config)

    def by_adamw(self, name: str) -> bool:
        return name.endswith("output.weight")

    def save(self, student: Student, folder: Path) -> None:
        save_medusa(
            student.network, folder, {"base_model_name_or_path": self.target, **self.target_keys}
        )
