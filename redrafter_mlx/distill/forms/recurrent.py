"""The recurrent form, ReDrafter's: see drafting/recurrent.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.drafter_forms import RecurrentForm
from redrafter_mlx.distill.forms.form import (
    Recipe,
    Student,
    check_same_form,
    chosen_layers,
    open_start,
)
from redrafter_mlx.distill.forms.positions import PositionStudent, logits_bytes, ready_to_train
from redrafter_mlx.distill.forms.recurrent_weights import fresh_drafter
from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.drafting.checkpoint import RECURRENT, load_recurrent, read_config, save_drafter
from redrafter_mlx.drafting.drafter_files import check_trained_for, open_files
from redrafter_mlx.drafting.recurrent import RecurrentNetwork
from redrafter_mlx.drafting.recurrent_config import DrafterConfig
from redrafter_mlx.target.fingerprint import trainable_size
from redrafter_mlx.target.model import Target

_NOT_FORM = {"target", "target_fingerprint", "draft_length"}
"""Config keys in which a drafter may differ from the drafter that its training starts from."""


@dataclass(frozen=True)
class RecurrentRecipe(Recipe):
    """The recipe for recurrent drafters of one configuration."""

    config: DrafterConfig

    title = "A small recurrent head"
    method = "ReDrafter ([arXiv 2403.09919](https://arxiv.org/abs/2403.09919))"

    @classmethod
    def of(
        cls, form: RecurrentForm, target: Target, name: str, fingerprint: str, draft_length: int
    ) -> RecurrentRecipe:
        """Return the recipe for a target called `name` and `draft_length` successive drafts."""
        D, V, size = target.hidden_size, target.vocab_size, form.draft_vocab
        return cls(
            DrafterConfig(
                hidden_size=D,
                vocab_size=V,
                exit_dim=2 * D if form.exit_dim is None else form.exit_dim,
                num_draft_layers=form.layers,
                rnn=form.rnn,
                head=form.head,
                first_state=form.first_state,
                context_layers=chosen_layers(form.context_layers, target.n_layers),
                draft_vocab_size=None if size == "all" else min(size, V),
                target=name,
                target_fingerprint=fingerprint,
                draft_length=draft_length,
            )
        )

    @property
    def record(self) -> dict[str, object]:
        return self.config.to_dict()

    @property
    def description(self) -> str:
        config = self.config
        parts = [
            "recurrent" if config.rnn else "not recurrent",
            *(["from the root's embedding"] if config.first_state == "embedding" else []),
            f"{config.num_draft_layers} residual blocks of width {config.exit_dim}",
            "output tied to the model's" if config.head == "tied" else "output of its own",
            f"drafts {config.output_size:,} of {config.vocab_size:,} tokens",
        ]
        if config.context_layers:
            numbers = ", ".join(map(str, config.context_layers))
            parts.append(f"reads what goes into layers {numbers} (counted from 0) as well")
        return ", ".join(parts + ([] if config.bits is None else [f"{config.bits}-bit"]))

    @property
    def context_layers(self) -> tuple[int, ...]:
        return self.config.context_layers

    @property
    def parameters(self) -> int:
        return trainable_size(RecurrentNetwork(self.config))

    def step_bytes(self, options: TrainOptions) -> int:
        return logits_bytes(options, self.config.output_size)

    def check_start(self, folder: Path) -> None:
        open_start(folder, RECURRENT)
        given, wanted = read_config(folder), self.config
        check_trained_for(given.to_dict(), folder, wanted.target, wanted.target_fingerprint)
        form = {key: value for key, value in vars(wanted).items() if key not in _NOT_FORM}
        check_same_form(folder, vars(given), form)

    def blank(self, target: Target, options: TrainOptions) -> Student:
        return RecurrentStudent(RecurrentNetwork(self.config), target, options)

    def fresh(
        self, target: Target, options: TrainOptions, counts: np.ndarray, texts: Sequence[Text]
    ) -> Student:
        network = fresh_drafter(self.config, target, counts, texts, options.seed)
        return RecurrentStudent(network, target, options)

    def start(self, folder: Path, target: Target, options: TrainOptions) -> Student:
        network = load_recurrent(open_files(folder), target)
        ready_to_train(network)
        return RecurrentStudent(network, target, options)


class RecurrentStudent(PositionStudent):
    """A recurrent head in training."""

    def __init__(self, network: RecurrentNetwork, target: Target, options: TrainOptions) -> None:
        super().__init__(network.bind(target), target, options)
        self._network = network

    @property
    def network(self) -> RecurrentNetwork:
        return self._network

    def by_adamw(self, name: str) -> bool:
        return name == f"lm_head.{self._network.config.num_draft_layers}.weight"

    def save(self, folder: Path) -> None:
        save_drafter(self._network, folder, dtype=mx.float16)
