"""The recurrent form, ReDrafter's: see drafting/recurrent.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from redrafter_mlx.distill.corpus.examples import lay_out
from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.drafter_forms import RecurrentForm
from redrafter_mlx.distill.forms.form import DRAFTS, Student, chosen_layers
from redrafter_mlx.distill.forms.fresh_weights import (
    context_rms,
    embedding_rms,
    logit_rms,
    scale_recurrent,
)
from redrafter_mlx.distill.forms.students import PositionRecipe
from redrafter_mlx.drafting.files.drafter_files import DrafterFiles, open_files
from redrafter_mlx.drafting.level_drafter import LevelDrafter
from redrafter_mlx.drafting.recurrent import (
    RECURRENT,
    RecurrentDrafter,
    RecurrentNetwork,
    load_recurrent,
    save_drafter,
)
from redrafter_mlx.drafting.recurrent_config import DrafterConfig, read_config
from redrafter_mlx.speculation.draft_vocabulary import choose_vocabulary, renew_vocabulary
from redrafter_mlx.target_model.model import Target

_NOT_FORM = {"target", "target_fingerprint", "draft_length"}
"""Config keys in which a drafter may differ from the drafter that its training starts from."""


class RecurrentRecipe(PositionRecipe):
    """The recipe for recurrent drafters, whose configuration names their target."""

    config: DrafterConfig
    options = RecurrentForm
    title = "A small recurrent head"
    method = "ReDrafter ([arXiv 2403.09919](https://arxiv.org/abs/2403.09919))"
    published = RECURRENT

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config, config.target, config.target_fingerprint)

    @classmethod
    def of(
        cls, form: RecurrentForm, target: Target, name: str, fingerprint: str, draft_length: int
    ) -> Self:
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

    @classmethod
    def of_files(cls, files: DrafterFiles, target: Target, name: str, fingerprint: str) -> Self:
        del target
        config = read_config(files.folder)
        return cls(replace(config, target=name, target_fingerprint=fingerprint))

    @property
    def drafts(self) -> int:
        return self.config.draft_length or DRAFTS

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
        return ", ".join(parts)

    @property
    def context_layers(self) -> tuple[int, ...]:
        return self.config.context_layers

    def network(self) -> RecurrentNetwork:
        return RecurrentNetwork(self.config)

    def bind(self, network: RecurrentNetwork, target: Target) -> RecurrentDrafter:
        return network.bind(target)

    def fresh(
        self, target: Target, counts: np.ndarray, texts: Sequence[Text], seed: int
    ) -> RecurrentDrafter:
        network, tokens = RecurrentNetwork.fresh(self.config, seed), None
        if self.config.draft_vocab_size is not None:
            tokens = mx.array(choose_vocabulary(counts, self.config.draft_vocab_size))
            network.draft_vocab = tokens
        read = context_rms(lay_out(texts, 1).states)
        scale_recurrent(network, read, embedding_rms(target, counts), logit_rms(target, tokens))
        return network.bind(target)

    def start(
        self, folder: Path, target: Target, counts: Callable[[], np.ndarray]
    ) -> RecurrentDrafter:
        given = load_recurrent(open_files(folder), target)
        weights, size = dict(tree_flatten(given.parameters())), self.config.draft_vocab_size
        if given.config.draft_vocab_size != size:
            weights.pop("draft_vocab", None)
            if size is not None:
                weights["draft_vocab"] = mx.array(choose_vocabulary(counts(), size))
        network = RecurrentNetwork(self.config)
        network.load_weights(list(weights.items()))
        return network.bind(target)

    def renewed(
        self, drafter: LevelDrafter, target: Target, counts: Callable[[], np.ndarray]
    ) -> LevelDrafter:
        """Return the drafter with the tokens that occur, if its output layer is the target's."""
        if self.config.head != "tied" or self.config.draft_vocab_size is None:
            return drafter
        network = cast(RecurrentNetwork, drafter.module)
        network.draft_vocab = mx.array(renew_vocabulary(np.array(network.draft_vocab), counts()))
        return network.bind(target)

    def compared(self, files: DrafterFiles) -> tuple[Mapping[str, object], Mapping[str, object]]:
        free = {*_NOT_FORM, *(["draft_vocab_size"] if self.config.head == "tied" else [])}
        wanted = {key: value for key, value in vars(self.config).items() if key not in free}
        return vars(read_config(files.folder)), wanted

    def by_adamw(self, name: str) -> bool:
        return name == f"lm_head.{self.config.num_draft_layers}.weight"

    def save(self, student: Student, folder: Path) -> None:
        save_drafter(student.network, folder, dtype=mx.float16)
