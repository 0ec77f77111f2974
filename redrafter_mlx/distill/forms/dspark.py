"""DSpark, trained on whole texts: see block_sequences.py, and published/blocks/dspark.py.

A block of a layer or two, whose distributions are corrected by the token before. In training that
token is the label, which is known, so all depths are computed at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Self

import mlx.core as mx
import numpy as np

from redrafter_mlx.distill.drafter_forms import DSparkForm
from redrafter_mlx.distill.forms.block_sequences import blocks_along
from redrafter_mlx.distill.forms.eagle import layer_sizes
from redrafter_mlx.distill.forms.eagle_sequences import Sequences
from redrafter_mlx.distill.forms.form import Recipe, Student, chosen_layers
from redrafter_mlx.distill.forms.fresh_weights import context_rms
from redrafter_mlx.distill.forms.students import LayerRecipe, WholeTextStudent
from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.drafting.files.drafter_files import DrafterFiles, parameters_of, write_drafter
from redrafter_mlx.drafting.published.blocks.config import Sight
from redrafter_mlx.drafting.published.blocks.dspark import (
    DSPARK,
    DSparkDrafter,
    MarkovConfig,
    MarkovNetwork,
    read_dspark,
)
from redrafter_mlx.drafting.published.blocks.rows import embedding_scale
from redrafter_mlx.drafting.published.heads.eagle_files import (
    LAYER_CONFIG,
    layer_config,
    proposing,
    vocabulary_tables,
)
from redrafter_mlx.speculation.draft_vocabulary import DraftVocabulary
from redrafter_mlx.target_model.model import Target

_WINDOW = 4096  # newest positions that the block attends to, as in files that name no window


class DSparkStudent(WholeTextStudent):
    """A DSpark network in training."""

    def __init__(
        self, recipe: Recipe, drafter: DSparkDrafter, target: Target, options: TrainOptions
    ) -> None:
        super().__init__(recipe, drafter, target, options)
        self._scale = embedding_scale(target)
        self._whole_head = target.output_rows()

    @property
    def drafter(self) -> DSparkDrafter:
        return DSparkDrafter(DSPARK.name, self.network, self._target, self.vocabulary)

    def drafts(self, batch: Sequences) -> Iterator[mx.array]:
        network, S = self.network, batch.features.shape[1]
        head = network.lm_head if network.config.own_head else self._whole_head
        rows = blocks_along(network, self._embedded, batch)[network.config.first_row :]
        texts = batch.tokens[:, 1 : 1 + S].reshape(-1)
        before = mx.concatenate([texts[batch.rows][:, None], batch.labels], axis=1)  # [M, 1 + T]
        state = mx.zeros((before.shape[0], 1, network.config.rank))
        for depth, row in enumerate(rows):
            tokens = before[:, depth : depth + 1]
            correction, state = network.markov_head(tokens, row[:, None], state)
            yield head(row).astype(mx.float32) + correction[:, 0]

    def _embedded(self, tokens: mx.array) -> mx.array:
        return self._target.embedding(tokens) * self._scale


class DSparkRecipe(LayerRecipe):
    """The recipe for DSpark drafters."""

    config: MarkovConfig
    options = DSparkForm
    student_class = DSparkStudent
    title = "A block of mask tokens"
    method = "DSpark ([arXiv 2607.05147](https://arxiv.org/abs/2607.05147))"
    published = DSPARK

    @classmethod
    def of(
        cls, form: DSparkForm, target: Target, name: str, fingerprint: str, draft_length: int
    ) -> Self:
        D, V, size = target.hidden_size, target.vocab_size, form.draft_vocab
        layers = chosen_layers(form.context_layers, target.n_layers)
        norms = (f"layers.{i}.self_attn.q_norm.weight" for i in range(form.layers))
        outputs = V if size == "all" else min(size, V)
        config = MarkovConfig(
            **layer_sizes(target, form.inner_dim),
            stored=frozenset(norms),
            layers=layers,
            context_size=len(layers) * D,
            n_layers=form.layers,
            output_size=outputs,
            own_head=outputs < V,
            rows=draft_length,
            mask_token=V - 1,
            first_row=0,
            sights=(Sight(causal=False, window=_WINDOW),) * form.layers,
            soft_cap=None,
            input_scale=1.0,
            output_scale=1.0,
            rank=form.rank,
        )
        return cls(config, name, fingerprint)

    @classmethod
    def of_files(cls, files: DrafterFiles, target: Target, name: str, fingerprint: str) -> Self:
        return cls(read_dspark(files, target), name, fingerprint)

    @property
    def stored_config(self) -> dict[str, object]:
        return dspark_config(self.config)

    @property
    def description(self) -> str:
        config = self.config
        read = ", ".join(map(str, config.layers))
        return (
            f"DSpark, {config.n_layers} decoder layers of width {config.hidden_size} over blocks "
            f"of {config.rows} tokens, reads what goes into layers {read} (counted from 0), with a "
            f"correction of rank {config.rank}, drafts {config.output_size:,} of "
            f"{config.vocab_size:,} tokens"
        )

    @property
    def drafts(self) -> int:
        return self.config.drafts

    def network(self) -> MarkovNetwork:
        return MarkovNetwork(self.config)

    def bind(
        self, network: MarkovNetwork, target: Target, vocabulary: DraftVocabulary | None = None
    ) -> DSparkDrafter:
        return DSparkDrafter(DSPARK.name, network, target, vocabulary or self.vocabulary())

    def begin(self, network: MarkovNetwork, inputs: np.ndarray) -> None:
        """Begin with the last of the layers, without a correction."""
        last = inputs[:, -self.config.hidden_size :]
        unit = 1 / mx.maximum(context_rms(last, normed=True), 1e-4)
        network.fc.weight = network.fc.weight * unit[:, None]
        head = network.markov_head
        head.markov_w2.weight = mx.zeros_like(head.markov_w2.weight)

    def by_adamw(self, name: str) -> bool:
        return name == "lm_head.weight" or name.startswith("markov_head.")

    def save(self, student: Student, folder: Path) -> None:
        tensors = parameters_of(student.network) | vocabulary_tables(student.vocabulary)
        proposal = proposing("dspark", self.config.rows, self.target)
        config = {**dspark_config(self.config), "speculators_config": proposal, **self.target_keys}
        write_drafter(folder, tensors, config, mx.float16)


def dspark_config(config: MarkovConfig) -> dict[str, object]:
    """Return the configuration in the layout of `speculators`."""
    return {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "block_size": config.rows,
        "mask_token_id": config.mask_token,
        "aux_hidden_state_layer_ids": [*config.layers],
        "draft_vocab_size": config.output_size,
        "markov_rank": config.rank,
        LAYER_CONFIG: layer_config(config) | {"model_type": "qwen3"},
    }
