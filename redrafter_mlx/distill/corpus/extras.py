"""Data that only some forms of drafter read, in folders next to the blocks of a corpus.

The texts and the hidden states that chose their tokens are for drafters of every form. Other data
is stored next to them, under the names of the blocks. So another form needs no new texts, only
another pass of the target over them:

    prompts/     the prompts as texts with soft labels, see read_texts.py
    read-KEY/    the same for other texts that are only read
    states-I-J/  inputs of context layers: `states` [A, layers * D], the input of each layer where
                 an answer token was chosen, in the target's type
    whole-I-J/   the prompts' states, for whole texts: `states` [P - texts, (layers + 1) * D], the
                 layer inputs and the last hidden state where a prompt's token was chosen

States are stored, not computed in every pass: for SmolLM2-135M on one CPU thread, computing them
takes 0.8 of the time of training on them with the recurrent form, and 0.5 with EAGLE's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.distill.checked_arrays import load_arrays, save_arrays
from redrafter_mlx.distill.corpus.hidden_states import teacher_forced_states, to_host
from redrafter_mlx.distill.corpus.read_texts import ReadTexts
from redrafter_mlx.distill.corpus.shards import Shard, Text, load_shard, naming_damage, save_shard
from redrafter_mlx.target_model.model import Target

FORMAT = "redrafter-mlx contexts 2"


@dataclass(frozen=True)
class Extras:
    """The data stored for one form of drafter."""

    context: tuple[int, ...] = ()  # layers whose inputs are stored
    read: tuple[ReadTexts, ...] = ()  # texts that are only read, with each block
    whole: bool = False  # whether the states of prompts are stored, to train on whole texts

    def files(self, shard: Path) -> list[Path]:
        own = [self._path(kind, shard) for kind in self._kinds]
        return own + [
            file for path in self.read_shards(shard) for file in (path, *self.each.files(path))
        ]

    def read_shards(self, shard: Path) -> list[Path]:
        return [texts.path(shard) for texts in self.read]

    def add(
        self,
        target: Target,
        tokenizer: TokenizerWrapper,
        shard: Path,
        block: int,
        texts: Sequence[Text] | None = None,
        *,
        new_prompts: bool = True,
    ) -> None:
        """Write the data that is missing for a block's shard, some of it in one more pass.

        texts:       texts of the shard; None loads them
        new_prompts: whether its prompts are trained on, if prompts are trained on at all
        """
        if all(path.exists() for path in self.files(shard)):
            return
        texts = load_shard(shard).texts if texts is None else texts
        target = target.reading(self.context)
        for kind in self._kinds:
            path = self._path(kind, shard)
            if not path.exists():
                texts = kind.added(target, texts)
                save_states([getattr(text, kind.field) for text in texts], path, target.dtype)
        for read in self.read:
            path, found = read.path(shard), None
            if not path.exists():
                found = read.of_block(target, tokenizer, block, texts if new_prompts else [])
                path.parent.mkdir(parents=True, exist_ok=True)
                save_shard(Shard(found, {}), path, {}, target.dtype)
            self.each.add(target, tokenizer, path, block, found)

    def load(self, shard: Path) -> list[Text]:
        """Return the texts of a shard, each with the data stored for it.

        Raises DamagedFileError, naming the file, if a file is damaged.
        """
        texts = load_shard(shard).texts
        for kind in self._kinds:
            texts = kind.load(self._path(kind, shard), texts)
        return texts

    def compute(self, target: Target, texts: Sequence[Text]) -> Sequence[Text]:
        """Compute the same data for texts that are in no corpus."""
        for kind in self._kinds:
            texts = kind.added(target.reading(self.context), texts)
        return texts

    @property
    def each(self) -> Extras:
        """The data stored for every shard, including the shards of texts that are only read."""
        return replace(self, read=())

    @property
    def _kinds(self) -> list[_States]:
        return [_LAYER_INPUTS] * bool(self.context) + [_PROMPT_STATES] * self.whole

    def _path(self, kind: _States, shard: Path) -> Path:
        return shard.parent / "-".join([kind.folder, *map(str, self.context)]) / shard.name


def save_states(states: Sequence[np.ndarray], path: Path, dtype: mx.Dtype | None = None) -> None:
    """Write the states of a shard's texts to one file, atomically, in this type or their own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    together = np.concatenate(states) if states else np.zeros((0, 1))
    save_arrays(path, {"states": mx.array(together, dtype)}, {"format": FORMAT})


@dataclass(frozen=True)
class _States:
    """A kind of states: its folder, and its field of a text."""

    folder: str
    field: str
    # returns tokens of a text, and the index of the first one whose state is kept
    read: Callable[[Text], tuple[list[int], int]]
    whole: bool  # whether the last hidden states are kept together with the layer inputs

    def load(self, path: Path, texts: Sequence[Text]) -> list[Text]:
        """Return the texts with their states in a file; DamagedFileError if they do not match."""
        counts = [len(tokens) - first for tokens, first in map(self.read, texts)]
        with naming_damage(path):
            together = to_host(load_arrays(path, FORMAT)[0]["states"])
            held, wanted = len(together), sum(counts)
            if held != wanted:
                raise ValueError(f"it holds {held} positions, its shard's texts have {wanted}")
        return self._with(texts, np.split(together, np.cumsum(counts, dtype=np.int64))[:-1])

    def _with(self, texts: Sequence[Text], states: Iterable[np.ndarray]) -> list[Text]:
        changes: list[dict[str, Any]] = [{self.field: own} for own in states]
        return [replace(text, **own) for text, own in zip(texts, changes, strict=True)]

    def added(self, target: Target, texts: Sequence[Text]) -> Sequence[Text]:
        """Return the texts with these states, computed in one pass unless all of them have some."""
        width = target.context_size - (0 if self.whole else target.hidden_size)
        held = [getattr(text, self.field) for text in texts]
        if all(states is not None and states.shape[1] == width for states in held):
            return texts
        found = teacher_forced_states(target, map(self.read, texts))
        return self._with(texts, (states[:, :width] for states in found))


_LAYER_INPUTS = _States(
    "states", "layer_inputs", lambda t: (t.prompt + t.answer.tolist(), len(t.prompt)), whole=False
)
_PROMPT_STATES = _States("whole", "prompt_states", lambda t: (t.prompt, 1), whole=True)
