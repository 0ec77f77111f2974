"""EAGLE-3, trained on whole texts: see eagle_sequences.py, and published/heads/eagle.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import mlx.core as mx
import numpy as np

from redrafter_mlx.distill.drafter_forms import EagleForm
from redrafter_mlx.distill.forms.form import Student, chosen_layers
from redrafter_mlx.distill.forms.fresh_weights import context_rms
from redrafter_mlx.distill.forms.students import LayerRecipe, UnrolledStudent
from redrafter_mlx.drafting.files.drafter_files import DrafterFiles
from redrafter_mlx.drafting.published.heads.eagle import EAGLE3, EagleDrafter
from redrafter_mlx.drafting.published.heads.eagle_config import EagleConfig, read_eagle_three
from redrafter_mlx.drafting.published.heads.eagle_files import save_eagle, speculators_config
from redrafter_mlx.drafting.published.heads.eagle_network import EagleNetwork, EagleThreeNetwork
from redrafter_mlx.drafting.published.network_config import ROPE_BASE
from redrafter_mlx.speculation.draft_vocabulary import DraftVocabulary
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.weights.raw_model import context_length

_HEAD_SIZE, _QUERIES = 64, (4, 3, 5, 7, 2, 1)
"""Size of an attention head, and the allowed numbers of query heads per key head, best first."""

_POSITIONS = 2048  # maximum number of positions of a drafter whose target names no limit


class EagleStudent(UnrolledStudent):
    """An EAGLE network in training."""

    @property
    def drafter(self) -> EagleDrafter:
        return EagleDrafter(EAGLE3.name, self.network, self._target, self.vocabulary)

    def head(self, hidden: mx.array) -> mx.array:
        logits: mx.array = self.network.lm_head(hidden)
        return logits


class EagleRecipe(LayerRecipe):
    """The recipe for EAGLE-3 drafters."""

    config: EagleConfig
    options = EagleForm
    student_class = EagleStudent
    title = "A decoder layer"
    method = "EAGLE-3 ([arXiv 2503.01840](https://arxiv.org/abs/2503.01840))"
    published = EAGLE3

    @classmethod
    def of(
        cls, form: EagleForm, target: Target, name: str, fingerprint: str, draft_length: int
    ) -> Self:
        del draft_length
        D, V, size = target.hidden_size, target.vocab_size, form.draft_vocab
        layers = chosen_layers(form.context_layers, target.n_layers)
        if form.context_layers == "auto" and layers[0] == 1:
            layers = (0, *layers)  # see EagleForm
        config = EagleConfig(
            **layer_sizes(target, form.inner_dim),
            stored=frozenset({"layers.0.hidden_norm.weight"}),
            layers=layers,
            context_size=len(layers) * D,
            n_layers=1,
            output_size=V if size == "all" else min(size, V),
            own_head=True,
            fc_norm=True,
        )
        return cls(config, name, fingerprint)

    @classmethod
    def of_files(cls, files: DrafterFiles, target: Target, name: str, fingerprint: str) -> Self:
        return cls(read_eagle_three(files, target), name, fingerprint)

    @property
    def stored_config(self) -> dict[str, object]:
        return speculators_config(self.config)

    @property
    def description(self) -> str:
        config = self.config
        read = ", ".join(map(str, config.layers))
        return (
            f"EAGLE-3, a decoder layer of width {config.hidden_size} with {config.heads} heads, "
            f"reads what goes into layers {read} (counted from 0), drafts {config.output_size:,} "
            f"of {config.vocab_size:,} tokens"
        )

    def network(self) -> EagleThreeNetwork:
        return EagleThreeNetwork(self.config)

    def bind(
        self, network: EagleNetwork, target: Target, vocabulary: DraftVocabulary | None = None
    ) -> EagleDrafter:
        return EagleDrafter(EAGLE3.name, network, target, vocabulary or self.vocabulary())

    def begin(self, network: EagleThreeNetwork, inputs: np.ndarray) -> None:
        parts = np.split(inputs, len(self.config.layers), axis=1)
        for norm, part in zip(network.fc_norm, parts, strict=True):
            norm.weight = 1 / mx.maximum(context_rms(part, normed=True), 1e-4)

    def by_adamw(self, name: str) -> bool:
        return name == "lm_head.weight"

    def save(self, student: Student, folder: Path) -> None:
        length, network = student.options.draft_length, student.network
        save_eagle(network, student.vocabulary, folder, length, self.target_keys)


def layer_sizes(target: Target, inner_dim: int | None) -> dict[str, Any]:
    """Return the sizes of a drafter's layers of the target's width, as `NetworkConfig` has them.

    inner_dim: width of the MLPs; None is eight thirds of the hidden size
    """
    D = target.hidden_size
    heads = next(n for n in range(max(1, D // _HEAD_SIZE), 0, -1) if D % n == 0)
    args = getattr(target.model, "args", None)
    longest = None if args is None else context_length(vars(args))
    return {
        "hidden_size": D,
        "intermediate_size": inner_dim or D * 8 // 3,
        "heads": heads,
        "kv_heads": heads // next(n for n in _QUERIES if heads % n == 0),
        "head_size": D // heads,
        "vocab_size": target.vocab_size,
        "own_embedding": False,
        "norm_eps": 1e-5,
        "rope_base": ROPE_BASE,
        "rope_scaling": None,
        "max_positions": longest or _POSITIONS,
    }
