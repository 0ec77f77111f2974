"""DSpark, trained on whole texts: see block_sequences.py, and published/blocks/dspark.py.

A block of a layer or two, whose distributions are corrected by the token before. In training that
token is the label, which is known, so all depths are computed at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import mlx.core as mx
import numpy as np

from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.drafter_forms import DSparkForm
from redrafter_mlx.distill.forms.block_sequences import blocks_along
from redrafter_mlx.distill.forms.eagle import flat, layer_sizes
from redrafter_mlx.distill.forms.eagle_sequences import Sequences
from redrafter_mlx.distill.forms.form import Recipe, Student, chosen_layers
from redrafter_mlx.distill.forms.fresh_weights import (
    SPREAD,
    context_rms,
    draw_matrices,
    last_part,
    logit_rms,
    output_matrix,
)
from redrafter_mlx.distill.forms.whole_texts import WholeTextRecipe, WholeTextStudent
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
from redrafter_mlx.speculation.draft_vocabulary import DraftVocabulary, choose_vocabulary
from redrafter_mlx.target_model.model import Target

_WINDOW = 4096
"""Newest positions that the block attends to, as in files that name no window."""


class DSparkRecipe(WholeTextRecipe):
    """The recipe for DSpark drafters."""

    config: MarkovConfig
    title = "A block of mask tokens"
    method = "DSpark ([arXiv 2607.05147](https://arxiv.org/abs/2607.05147))"
    published = DSPARK

    @classmethod
    def of(
        cls, form: DSparkForm, target: Target, name: str, fingerprint: str, draft_length: int
    ) -> DSparkRecipe:
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
    def record(self) -> dict[str, object]:
        return {"form": DSparkForm.form, **dspark_config(self.config)}

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
    def context_layers(self) -> tuple[int, ...]:
        return self.config.layers

    @property
    def drafts(self) -> int:
        return self.config.drafts

    def network(self) -> MarkovNetwork:
        return MarkovNetwork(self.config)

    def bind(
        self, network: MarkovNetwork, target: Target, tokens: mx.array | None = None
    ) -> DSparkDrafter:
        V, size = self.config.vocab_size, self.config.output_size
        if tokens is None and size < V:
            tokens = mx.arange(size)
        return DSparkDrafter(DSPARK.name, network, target, DraftVocabulary(size, V, tokens))

    def fresh(
        self, target: Target, counts: np.ndarray, texts: Sequence[Text], seed: int
    ) -> DSparkDrafter:
        """Return an untrained drafter, without a correction at first.

        Its context starts as the last of the layers that it reads, each coordinate scaled to unit
        size; see `EagleRecipe.fresh`.
        """
        config, network = self.config, self.network()
        D, size = config.hidden_size, config.output_size
        tokens = mx.array(choose_vocabulary(counts, size)) if size < config.vocab_size else None
        draw_matrices(network, seed, lambda shape: shape[1] ** -0.5)
        inputs = np.concatenate([text.whole_states for text in texts])
        last = inputs[:, config.context_size - D : config.context_size]
        unit = 1 / mx.maximum(context_rms(last, normed=True), 1e-4)
        network.fc.weight = last_part(config.context_size, D) * unit[:, None]
        head = network.markov_head
        head.markov_w2.weight = mx.zeros_like(head.markov_w2.weight)
        if config.own_head:
            network.lm_head.weight = output_matrix(target, tokens)
        network.norm.weight = mx.full((D,), SPREAD / logit_rms(target, tokens))
        return self.bind(network, target, tokens)

    def compared(self, files: DrafterFiles) -> tuple[Mapping[str, object], Mapping[str, object]]:
        return flat(files.config), flat(dspark_config(self.config))

    def student(
        self, drafter: DSparkDrafter, target: Target, options: TrainOptions
    ) -> DSparkStudent:
        return DSparkStudent(self, drafter, target, options)

    def by_adamw(self, name: str) -> bool:
        return name == "lm_head.weight" or name.startswith("markov_head.")

    def save(self, student: Student, folder: Path) -> None:
        tensors = parameters_of(student.network) | vocabulary_tables(student.vocabulary)
        proposal = proposing("dspark", self.config.rows, self.target)
        config = {**dspark_config(self.config), "speculators_config": proposal, **self.target_keys}
        write_drafter(folder, tensors, config, mx.float16)


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
