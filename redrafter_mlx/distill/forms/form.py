"""What a form of drafter is to training: the one interface that every form implements.

A form has a record of its options in `drafter_forms.py` and a file here, with a `Recipe` and a
`Student`; `registry.py` leads from one to the other. No other part of training asks for the form.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, TypeAlias

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from redrafter_mlx.config import BeamShape
from redrafter_mlx.distill.corpus.examples import Examples
from redrafter_mlx.distill.corpus.extras import Extras
from redrafter_mlx.distill.corpus.read_texts import ReadTexts
from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.evaluation.acceptance import DraftQuality
from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.drafting.drafter_files import DrafterFiles, Form, open_files
from redrafter_mlx.drafting.forms import find_form
from redrafter_mlx.errors import BadInputError, DamagedFileError, MismatchError
from redrafter_mlx.target.model import Target
from redrafter_mlx.weights.files.names import WEIGHTS

BatchLoss: TypeAlias = Callable[[], mx.array]
"""The loss of one batch at the network's present weights."""


class Student(ABC):
    """A drafter in training, with what it takes of its target."""

    @property
    @abstractmethod
    def network(self) -> nn.Module:
        """Its trainable parameters are trained; the target's are not among them."""

    @abstractmethod
    def losses(self, examples: Examples, epoch: int, skip: int) -> Iterator[BatchLoss]:
        """One pass over the corpus, batch by batch; `skip` leaves out the first ones."""

    @abstractmethod
    def trial(self) -> BatchLoss:
        """The loss of a batch of random numbers, for timing."""

    @abstractmethod
    def evaluate(self, held_out: Sequence[Text], shapes: Sequence[BeamShape]) -> DraftQuality:
        """Its quality on texts that it was not trained on."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the drafter in its published layout, each file whole, the weights first."""

    def by_adamw(self, name: str) -> bool:
        """Whether a matrix is AdamW's although the others are Muon's: embeddings, output layers."""
        del name
        return False


class Recipe(ABC):
    """How drafters of one form are made for one target, before any has weights.

    title, method: what the model card calls it, and the paper
    """

    title: ClassVar[str]
    method: ClassVar[str]

    @property
    @abstractmethod
    def record(self) -> dict[str, object]:
        """For JSON; a run resumes, and a drafter is trained further, where it is the same."""

    @property
    @abstractmethod
    def description(self) -> str:
        """Its form and sizes, for the model card."""

    @property
    def context_layers(self) -> tuple[int, ...]:
        """Layers of the target whose inputs it reads beside the last hidden state."""
        return ()

    @property
    @abstractmethod
    def parameters(self) -> int:
        """How many numbers are trained."""

    @abstractmethod
    def step_bytes(self, options: TrainOptions) -> int:
        """The most that one batch takes in memory."""

    def extras(self, read: Sequence[ReadTexts]) -> Extras:
        """What it reads of the corpus beside the shards; `read` are texts that are only read."""
        return Extras(self.context_layers, tuple(read))

    @abstractmethod
    def check_start(self, folder: Path) -> None:
        """Refuse a folder that no training of this recipe can start from; no weights are read.

        Raises:
          ModelNotFoundError, DamagedFileError: for what is no drafter
          MismatchError: naming the key in which they differ, or the target it was trained for
        """

    @abstractmethod
    def blank(self, target: Target, options: TrainOptions) -> Student:
        """A student whose weights mean nothing, for timing."""

    @abstractmethod
    def fresh(
        self, target: Target, options: TrainOptions, counts: np.ndarray, texts: Sequence[Text]
    ) -> Student:
        """An untrained student.

        counts: [V], how often each token is a label
        texts:  some of the corpus
        """

    @abstractmethod
    def start(self, folder: Path, target: Target, options: TrainOptions) -> Student:
        """The drafter in a folder, which `check_start` let pass, as a student."""


def check_layers(layers: tuple[int, ...], n_layers: int) -> tuple[int, ...]:
    """The layers, if a target of so many has them all; raises BadInputError."""
    if any(i >= n_layers for i in layers):
        raise BadInputError(
            f"the drafter cannot read layers {', '.join(map(str, layers))}; "
            f"the target has {n_layers}, counted from 0"
        )
    return layers


def open_start(folder: Path, form: Form) -> DrafterFiles:
    """The folder of a drafter that training of a form starts from; errors as in `check_start`."""
    files = open_files(folder)
    found = find_form(files)
    if found is not form:
        raise MismatchError(
            f"{folder} is a {found.name} drafter, and {form.name} is asked for; a drafter is "
            f"trained further in its own form (--form)"
        )
    return files


def check_same_form(
    folder: Path, given: Mapping[str, object], wanted: Mapping[str, object]
) -> None:
    """Raises MismatchError naming the first key of `wanted` in which a drafter differs."""
    for key, value in wanted.items():
        if given.get(key) != value:
            raise MismatchError(
                f"{folder} has {key} {given.get(key)}, and {value} is asked for; a drafter is "
                f"trained further in its own form"
            )


def weights_digest(folder: Path) -> str:
    """The SHA-256 of a drafter's weights; raises DamagedFileError where there are none."""
    weights = folder / WEIGHTS
    if not weights.is_file():
        raise DamagedFileError(f"{weights} is missing; a drafter's folder holds {WEIGHTS}")
    return hashlib.sha256(weights.read_bytes()).hexdigest()
