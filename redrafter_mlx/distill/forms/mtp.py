"""MTP heads, trained on whole texts: see eagle_sequences.py, and published/heads/mtp.py.

A model's own head was trained for one step. Here it is trained for several, on its own guesses, as
FastMTP does (arXiv 2509.18362). Embedding and output layer stay the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import mlx.core as mx
import numpy as np
from mlx.utils import tree_unflatten

from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.drafter_forms import MtpForm
from redrafter_mlx.distill.forms.form import DRAFTS, Student
from redrafter_mlx.distill.forms.fresh_weights import SPREAD, context_rms, draw_matrices, logit_rms
from redrafter_mlx.distill.forms.students import UnrolledStudent, WholeTextRecipe
from redrafter_mlx.drafting.files.drafter_files import (
    DrafterFiles,
    Form,
    open_files,
    parameters_of,
    write_drafter,
)
from redrafter_mlx.drafting.files.recognition import holds_mtp
from redrafter_mlx.drafting.files.tensor_names import of_mtp_head
from redrafter_mlx.drafting.published.heads.mtp import MTP, MtpConfig, MtpDrafter, MtpNetwork
from redrafter_mlx.target_model.model import Target

_CHOICES = "e_score_correction_bias"
"""A bias that decides between experts, through which no gradient flows."""


class MtpStudent(UnrolledStudent):
    """An MTP head in training."""

    @property
    def drafter(self) -> MtpDrafter:
        return MtpDrafter(self.network, self._target)

    def head(self, hidden: mx.array) -> mx.array:
        """Map outputs to logits in float32: float16 holds no gradient of a scaled loss."""
        logits: mx.array = self._logits(hidden[None])[0]
        return logits


@dataclass(frozen=True)
class MtpRecipe(WholeTextRecipe):
    """The recipe for MTP heads, whose layer is of the kind of the target's `made_for`."""

    config: MtpConfig
    made_for: Target
    options = MtpForm
    student_class = MtpStudent
    title = "A multi-token-prediction head"
    method = "MTP ([arXiv 2412.19437](https://arxiv.org/abs/2412.19437)), trained for several steps"
    published = MTP

    @classmethod
    def of(
        cls, form: MtpForm, target: Target, name: str, fingerprint: str, draft_length: int
    ) -> Self:
        del form, draft_length
        config = MtpConfig.of(target, centred=True, normed_again=True)
        return cls(config, name, fingerprint, target)

    @classmethod
    def of_files(cls, files: DrafterFiles, target: Target, name: str, fingerprint: str) -> Self:
        del files
        return cls.of(MtpForm(), target, name, fingerprint, DRAFTS)

    @property
    def record(self) -> dict[str, object]:
        target = self.made_for
        return {
            "form": MtpForm.form,
            "layer": target.model_type,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
        }

    @property
    def description(self) -> str:
        target = self.made_for
        return (
            f"an MTP head: a layer of {target.model_type} of width {target.hidden_size}, with the "
            f"target's embedding and output layer, drafts all {target.vocab_size:,} tokens"
        )

    @property
    def output_size(self) -> int:
        return self.made_for.vocab_size

    def network(self) -> MtpNetwork:
        network = MtpNetwork(self.config, self.made_for)
        network.freeze(keys=[_CHOICES])
        return network

    def bind(self, network: MtpNetwork, target: Target) -> MtpDrafter:
        return MtpDrafter(network, target)

    def fresh(
        self, target: Target, counts: np.ndarray, texts: Sequence[Text], seed: int
    ) -> MtpDrafter:
        """Return a head that starts with the hidden state, and embeddings mixed at random."""
        del counts
        network, D = self.network(), target.hidden_size
        draw_matrices(network, seed, lambda shape: shape[-1] ** -0.5)
        names = [name for name in parameters_of(network) if name.endswith(".bias")]
        biases = {name: mx.zeros_like(parameters_of(network)[name]) for name in names}
        network.update(tree_unflatten([*biases.items()]))
        network.fc.weight = mx.concatenate([network.fc.weight[:, :D], mx.eye(D)], axis=1)
        states = np.concatenate([text.whole_states for text in texts])
        unit = 1 / mx.maximum(context_rms(states, normed=True), 1e-4)
        network.pre_fc_norm_hidden.weight = unit
        network.norm.weight = mx.full((D,), SPREAD / logit_rms(target, None))
        return self.bind(network, target)

    def start(self, folder: Path, target: Target, counts: Callable[[], np.ndarray]) -> MtpDrafter:
        """Return the head in a folder, or a model; its output is read after its last norm."""
        del counts
        found = MTP.load(self.open(folder)[0], target).module
        assert found is not None, "it has just been loaded"
        network = self.network()
        network.set_dtype(target.dtype)
        network.update(found.parameters())
        mx.eval(network.parameters())
        return self.bind(network, target)

    def compared(self, files: DrafterFiles) -> tuple[Mapping[str, object], Mapping[str, object]]:
        del files  # sizes are checked on loading
        return {}, {}

    def by_adamw(self, name: str) -> bool:
        del name
        return False

    def save(self, student: Student, folder: Path) -> None:
        """Write the head as mlx-vlm splits Qwen's off, norms with their 1."""
        args = getattr(self.made_for.model, "args", None)
        plain = (str, int, float, list, dict, type(None))
        sizes = {} if args is None else vars(args)
        config = {
            "model_type": f"{self.made_for.model_type.removesuffix('_text')}_mtp",
            "block_size": student.options.draft_length + 1,
            "text_config": {key: value for key, value in sizes.items() if isinstance(value, plain)},
            **self.target_keys,
        }
        write_drafter(folder, parameters_of(student.network), config, mx.float16)

    def open(self, folder: Path) -> tuple[DrafterFiles, Form]:
        if holds_mtp(folder):
            return open_files(folder, of=of_mtp_head), MTP
        return super().open(folder)
