"""The one interface that every trainable form of drafter implements.

A form has a record of its options in `drafter_forms.py`, and a file here with a `Recipe` and a
`Student`. `registry.py` maps the record to the recipe. No other part of training asks which form
it is.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

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
"""A function that computes the loss of one batch at the network's current weights."""


class Student(ABC):
    """A drafter in training, with the parts of the target that it uses."""

    @property
    @abstractmethod
    def network(self) -> nn.Module:
        """The network whose trainable parameters are trained; none of them is the target's."""

    @abstractmethod
    def losses(self, examples: Examples, epoch: int, skip: int) -> Iterator[BatchLoss]:
        """Yield the loss of each batch of one pass over the corpus, without the first `skip`."""

    @abstractmethod
    def trial(self) -> BatchLoss:
        """Return the loss of a batch of random numbers, for timing."""

    @abstractmethod
    def evaluate(self, held_out: Sequence[Text], shapes: Sequence[BeamShape]) -> DraftQuality:
        """Measure its quality on texts that it was not trained on."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the drafter in its published layout, each file atomically, the weights first."""

    def by_adamw(self, name: str) -> bool:
        """Whether AdamW trains a matrix (embeddings, output layers) and Muon the others."""
        del name
        return False


class Recipe(ABC):
    """How drafters of one form are made for one target, before any weights exist.

    title, method: the model card's name of the drafter, and of the method with its paper
    """

    title: ClassVar[str]
    method: ClassVar[str]

    @property
    @abstractmethod
    def record(self) -> dict[str, object]:
        """A record for JSON; it must be equal to resume a run or to train a drafter further."""

    @property
    @abstractmethod
    def description(self) -> str:
        """Form and sizes, for the model card."""

    @property
    def context_layers(self) -> tuple[int, ...]:
        """Layers of the target whose inputs it reads in addition to the last hidden state."""
        return ()

    @property
    @abstractmethod
    def parameters(self) -> int:
        """Number of trained parameters."""

    @abstractmethod
    def step_bytes(self, options: TrainOptions) -> int:
        """Return the maximum memory of one batch, in bytes."""

    def extras(self, read: Sequence[ReadTexts]) -> Extras:
        """Return what it reads in addition to the shards; `read` are texts that are only read."""
        return Extras(self.context_layers, tuple(read))

    @abstractmethod
    def check_start(self, folder: Path) -> None:
        """Check that training by this recipe can start from a folder; reads no weights.

        Raises:
          ModelNotFoundError, DamagedFileError: if the folder holds no drafter
          MismatchError: naming a key that differs, or the target that the drafter was trained for
        """

    @abstractmethod
    def blank(self, target: Target, options: TrainOptions) -> Student:
        """Return a student with arbitrary weights, for timing."""

    @abstractmethod
    def fresh(
        self, target: Target, options: TrainOptions, counts: np.ndarray, texts: Sequence[Text]
    ) -> Student:
        """Return an untrained student.

        counts: [V], how often each token is a label
        texts:  some texts of the corpus
        """

    @abstractmethod
    def start(self, folder: Path, target: Target, options: TrainOptions) -> Student:
        """Return the drafter in a folder, which has passed `check_start`, as a student."""


def chosen_layers(layers: tuple[int, ...] | Literal["auto"], n_layers: int) -> tuple[int, ...]:
    """Return the layers to read; "auto" are those at 2/3 and 9/10 of the depth.

    Raises BadInputError unless a target of `n_layers` has them all.
    """
    if layers == "auto":
        return tuple(sorted({n_layers * 2 // 3, n_layers * 9 // 10}))
    if any(i >= n_layers for i in layers):
        raise BadInputError(
            f"the drafter cannot read layers {', '.join(map(str, layers))}; "
            f"the target has {n_layers}, counted from 0"
        )
    return layers


def open_start(folder: Path, form: Form) -> DrafterFiles:
    """Open a drafter of the given form to start training from; errors as in `check_start`."""
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
    """Raise MismatchError naming the first key of `wanted` that differs in `given`."""
    for key, value in wanted.items():
        if given.get(key) != value:
            raise MismatchError(
                f"{folder} has {key} {given.get(key)}, and {value} is asked for; a drafter is "
                f"trained further in its own form"
            )


def weights_digest(folder: Path) -> str:
    """Return the SHA-256 of a drafter's weights; raises DamagedFileError if there are none."""
    weights = folder / WEIGHTS
    if not weights.is_file():
        raise DamagedFileError(f"{weights} is missing; a drafter's folder holds {WEIGHTS}")
    return hashlib.sha256(weights.read_bytes()).hexdigest()
