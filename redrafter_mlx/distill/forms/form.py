"""The one interface that every trainable form of drafter implements.

A form has a record of its options in `drafter_forms.py`, and a `Recipe` in a file here. One that
is unlike those of `students.py` has a `Student` too. `registry.py` maps the record to the recipe.
No other part of training asks which form it is.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeAlias

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from redrafter_mlx.config import BeamShape
from redrafter_mlx.distill.corpus.examples import Batch, Examples
from redrafter_mlx.distill.corpus.extras import Extras
from redrafter_mlx.distill.corpus.read_texts import ReadTexts
from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.drafter_forms import DrafterForm
from redrafter_mlx.distill.evaluation.acceptance import DraftQuality, measure_quality
from redrafter_mlx.distill.forms.eagle_sequences import Sequences
from redrafter_mlx.distill.forms.loss import distillation_loss
from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.drafting.files.drafter_files import (
    DrafterFiles,
    Form,
    check_trained_for,
    open_files,
)
from redrafter_mlx.drafting.files.forms import find_form
from redrafter_mlx.drafting.level_drafter import LevelDrafter
from redrafter_mlx.errors import BadInputError, MismatchError
from redrafter_mlx.target_model.fingerprint import trainable_size
from redrafter_mlx.target_model.model import Target

DRAFTS = 3
"""Drafts in a row, where a drafter's files do not say for how many it was trained."""

BatchLoss: TypeAlias = Callable[[], mx.array]
"""A function that computes the loss of one batch at the network's current weights."""


class Student(ABC):
    """A drafter in training, with the parts of the target that it uses.

    network: in float32; none of its trainable parameters is the target's
    """

    def __init__(
        self, recipe: Recipe, drafter: LevelDrafter, target: Target, options: TrainOptions
    ) -> None:
        self.recipe, self.vocabulary = recipe, drafter.vocabulary
        network = drafter.module
        assert network is not None, "every form that is trained has one"
        network.set_dtype(mx.float32)
        network.train()
        mx.eval(network.parameters())
        self.network: Any = network
        self._target, self.options = target, options
        self._outputs = self.vocabulary.index()
        self._logits = target.logits_of(self.vocabulary.tokens)

    @abstractmethod
    def losses(self, examples: Examples, epoch: int, skip: int) -> Iterator[BatchLoss]:
        """Yield the loss of each batch of one pass over the corpus, without the first `skip`."""

    @abstractmethod
    def batches(self, examples: Examples) -> float:
        """Return the number of batches in a pass over the corpus, about the same in each."""

    @property
    @abstractmethod
    def drafter(self) -> LevelDrafter:
        """A drafter of the network as it is now."""

    def evaluate(self, held_out: Sequence[Text], shapes: Sequence[BeamShape]) -> DraftQuality:
        return measure_quality(self.drafter, held_out, self.options.draft_length, shapes)

    @abstractmethod
    def drafts(self, batch: Any) -> Iterator[mx.array]:
        """Yield logits [P, V'] float32 of each draft after a batch's roots, fed with the labels."""

    def loss(self, batch: Batch | Sequences) -> mx.array:
        options = self.options
        teacher = self.teacher(batch.states) if options.soft_share > 0 else None
        return distillation_loss(
            self.drafts(batch),
            batch,
            self._outputs,
            teacher,
            options.depth_weights,
            options.soft_share,
        )

    def teacher(self, states: mx.array) -> mx.array:
        """Return the soft labels [N, V']: the target's probabilities after its states [N, C]."""
        logits = self._logits(states[None].astype(self._target.dtype))[0]
        return mx.softmax(logits.astype(mx.float32), axis=-1)


@dataclass(frozen=True)
class Recipe(ABC):
    """How drafters of one form and one configuration are made for one target."""

    options: ClassVar[type[DrafterForm]]  # the record of its options
    student_class: ClassVar[type[Student]]
    # title, method: the model card's name of the drafter, and of the method with its paper
    title: ClassVar[str]
    method: ClassVar[str]
    published: ClassVar[Form]  # the form of the files
    config: Any
    # target, fingerprint: name and fingerprint of the target
    target: str | None
    fingerprint: str | None

    @classmethod
    @abstractmethod
    def of(cls, form: Any, target: Target, name: str, fingerprint: str, draft_length: int) -> Self:
        """Return the recipe for drafters with these options, for a target of this name.

        Raises BadInputError for options that this target's drafter cannot have.
        """

    @classmethod
    @abstractmethod
    def of_files(cls, files: DrafterFiles, target: Target, name: str, fingerprint: str) -> Self:
        """Return the recipe of a drafter's files; MismatchError if they do not fit the target."""

    @property
    @abstractmethod
    def record(self) -> dict[str, object]:
        """A record for JSON; it must be equal to resume a run."""

    @property
    @abstractmethod
    def description(self) -> str:
        """Form and sizes, for the model card."""

    @property
    def context_layers(self) -> tuple[int, ...]:
        """Layers of the target whose inputs it reads in addition to the last hidden state."""
        return ()

    @property
    def drafts(self) -> int:
        """Number of drafts in a row that drafters of this configuration are trained for."""
        return DRAFTS

    @property
    def output_size(self) -> int:
        """V', the number of tokens that it can draft."""
        return int(self.config.output_size)

    @property
    def parameters(self) -> int:
        """Number of trained parameters."""
        return trainable_size(self.network())

    def step_bytes(self, options: TrainOptions) -> int:
        """Return the maximum memory of a batch: logits, their gradients, and soft labels."""
        return 12 * options.batch * options.draft_length * self.output_size

    def extras(self, read: Sequence[ReadTexts]) -> Extras:
        """Return what it reads in addition to the shards; `read` are texts that are only read."""
        return Extras(self.context_layers, tuple(read))

    @abstractmethod
    def network(self) -> nn.Module:
        """Return a network with arbitrary weights."""

    @abstractmethod
    def bind(self, network: Any, target: Target) -> LevelDrafter:
        """Return a network of this form as a drafter for the target."""

    @abstractmethod
    def fresh(
        self, target: Target, counts: np.ndarray, texts: Sequence[Text], seed: int
    ) -> LevelDrafter:
        """Return an untrained drafter, whose weights are drawn from `seed` alone.

        counts: [V], how often each token is a label
        texts:  some texts of the corpus
        """

    @property
    def target_keys(self) -> dict[str, str | None]:
        """Keys of config.json that name the target."""
        return {"target": self.target, "target_fingerprint": self.fingerprint}

    def start(self, folder: Path, target: Target, counts: Callable[[], np.ndarray]) -> LevelDrafter:
        """Return the drafter in a folder, which has passed `check_start`.

        counts: returns [V], how often each token is a label, for a form that can choose anew which
          tokens are drafted
        """
        del counts
        return self.published.load(open_files(folder), target)

    def renewed(
        self, drafter: LevelDrafter, target: Target, counts: Callable[[], np.ndarray]
    ) -> LevelDrafter:
        """Return the drafter with the tokens that occur, for a form that can draft others."""
        del target, counts
        return drafter

    def check_start(self, folder: Path) -> str:
        """Check that training can start from the drafter in a folder; return its weights' SHA-256.

        Raises ModelNotFoundError or DamagedFileError without a drafter, and MismatchError naming a
        key that differs, or the target that it was trained for.
        """
        files, found = self.open(folder)
        if found is not self.published:
            raise MismatchError(
                f"{folder} is a {found.name} drafter, and {self.published.name} is asked for; a "
                f"drafter is trained further in its own form (--form)"
            )
        check_trained_for(files.config, folder, self.target, self.fingerprint)
        given, wanted = self.compared(files)
        for key, value in wanted.items():
            if given.get(key) != value:
                raise MismatchError(
                    f"{folder} has {key} {given.get(key)}, and {value} is asked for; a drafter is "
                    f"trained further in its own form"
                )
        digest = hashlib.sha256()
        for file in files.tensors.files:
            with file.open("rb") as opened:
                hashlib.file_digest(opened, lambda: digest)
        return digest.hexdigest()

    def open(self, folder: Path) -> tuple[DrafterFiles, Form]:
        """Open the drafter in a folder; return its files and their form."""
        files = open_files(folder)
        return files, find_form(files)

    @abstractmethod
    def compared(self, files: DrafterFiles) -> tuple[Mapping[str, object], Mapping[str, object]]:
        """Return the keys of a drafter's files, and those that training from it asks for."""

    def student(self, drafter: LevelDrafter, target: Target, options: TrainOptions) -> Student:
        return self.student_class(self, drafter, target, options)

    @abstractmethod
    def by_adamw(self, name: str) -> bool:
        """Whether AdamW trains a matrix (embeddings, output layers) and Muon the others."""

    @abstractmethod
    def save(self, student: Student, folder: Path) -> None:
        """Write a drafter in its published layout, each file atomically, the weights first."""


def chosen_layers(layers: tuple[int, ...] | Literal["auto"], n_layers: int) -> tuple[int, ...]:
    """Return the layers to read; BadInputError unless a target of `n_layers` has them all."""
    if layers == "auto":
        return tuple(sorted({n_layers * 2 // 3, n_layers * 9 // 10}))
    if any(i >= n_layers for i in layers):
        raise BadInputError(
            f"the drafter cannot read layers {', '.join(map(str, layers))}; "
            f"the target has {n_layers}, counted from 0"
        )
    return layers
