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
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.distill.corpus.hidden_states import teacher_forced_states, to_host
from redrafter_mlx.distill.corpus.read_texts import ReadTexts
from redrafter_mlx.distill.corpus.shards import (
    Shard,
    Text,
    damaged,
    load_arrays,
    load_shard,
    save_shard,
)
from redrafter_mlx.runtime.atomic_write import atomic_write
from redrafter_mlx.target.model import Target

FORMAT = "redrafter-mlx contexts 1"


@dataclass(frozen=True)
class Extras:
    """The data stored for one form of drafter.

    context: layers whose inputs are stored
    read:    texts that are only read, with each block
    whole:   whether the states of prompts are stored, so that whole texts can be trained on
    """

    context: tuple[int, ...] = ()
    read: tuple[ReadTexts, ...] = ()
    whole: bool = False

    def files(self, shard: Path) -> list[Path]:
        """Return the paths of this data for a shard."""
        own = [layer_inputs_path(shard, self.context)] if self.context else []
        own += [prompt_states_path(shard, self.context)] if self.whole else []
        return own + [
            file for path in self.read_shards(shard) for file in (path, *self.each.files(path))
        ]

    def read_shards(self, shard: Path) -> list[Path]:
        """Return the shards of the texts that were read with a shard."""
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
        """Write the data that is missing for a block's shard.

        Data that its texts do not hold already is computed in one more pass over them.

        texts:       texts of the shard; None loads them
        new_prompts: whether its prompts are trained on, if prompts are trained on at all
        """
        if all(path.exists() for path in self.files(shard)):
            return
        texts = load_shard(shard).texts if texts is None else texts
        target = target.reading(self.context)
        path = layer_inputs_path(shard, self.context)
        if self.context and not path.exists():
            texts = with_layer_inputs(target, texts)
            inputs = [text.layer_inputs for text in texts if text.layer_inputs is not None]
            save_states(inputs, path, target.dtype)
        path = prompt_states_path(shard, self.context)
        if self.whole and not path.exists():
            texts = with_prompt_states(target, texts)
            prompts = [text.prompt_states for text in texts if text.prompt_states is not None]
            save_states(prompts, path, target.dtype)
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
        if self.context:
            answers = [len(text.answer) for text in texts]
            saved = load_states(layer_inputs_path(shard, self.context), answers)
            texts = [replace(t, layer_inputs=own) for t, own in zip(texts, saved, strict=True)]
        if self.whole:
            saved = load_states(
                prompt_states_path(shard, self.context), [len(text.prompt) - 1 for text in texts]
            )
            texts = [replace(t, prompt_states=own) for t, own in zip(texts, saved, strict=True)]
        return texts

    def compute(self, target: Target, texts: Sequence[Text]) -> list[Text]:
        """Compute the same data for texts that are in no corpus."""
        target = target.reading(self.context)
        if self.context:
            texts = with_layer_inputs(target, texts)
        if self.whole:
            texts = with_prompt_states(target, texts)
        return list(texts)

    @property
    def each(self) -> Extras:
        """The data stored for every shard, including the shards of texts that are only read."""
        return replace(self, read=())


def layer_inputs_path(shard: Path, layers: Sequence[int]) -> Path:
    """Return the path of the layer inputs of a shard."""
    return shard.parent / f"states-{'-'.join(map(str, layers))}" / shard.name


def prompt_states_path(shard: Path, layers: Sequence[int]) -> Path:
    """Return the path of the states of a shard's prompts."""
    return shard.parent / "-".join(["whole", *map(str, layers)]) / shard.name


def with_layer_inputs(target: Target, texts: Sequence[Text]) -> Sequence[Text]:
    """Return the texts with the inputs [A, C - D] of the context layers along their answers."""
    if all(text.layer_inputs is not None for text in texts):
        return texts
    whole = ((text.prompt + text.answer.tolist(), len(text.prompt)) for text in texts)
    found = teacher_forced_states(target, whole)
    return [
        replace(text, layer_inputs=states[:, : -target.hidden_size])
        for text, states in zip(texts, found, strict=True)
    ]


def with_prompt_states(target: Target, texts: Sequence[Text]) -> Sequence[Text]:
    """Return the texts with the states [len(prompt) - 1, C] along their prompts."""
    width = target.context_size
    if all(t.prompt_states is not None and t.prompt_states.shape[1] == width for t in texts):
        return texts
    longer = [text.prompt for text in texts if len(text.prompt) > 1]
    found = teacher_forced_states(target, ((prompt, 1) for prompt in longer))
    nothing = to_host(mx.zeros((0, width), target.dtype))
    return [
        replace(text, prompt_states=next(found) if len(text.prompt) > 1 else nothing)
        for text in texts
    ]


def save_states(states: Sequence[np.ndarray], path: Path, dtype: mx.Dtype | None = None) -> None:
    """Write the states of one shard's texts to one file, atomically.

    dtype: type of the numbers in the file; None is the arrays' type
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    together = np.concatenate(states) if states else np.zeros((0, 1))
    with atomic_write(path) as partial:
        mx.save_safetensors(str(partial), {"states": mx.array(together, dtype)}, {"format": FORMAT})


def load_states(path: Path, counts: Sequence[int]) -> list[np.ndarray]:
    """Return the states of each text of a shard; text i has `counts[i]` of them.

    Raises DamagedFileError, naming the file, if it is damaged or belongs to other texts.
    """
    try:
        arrays, metadata = load_arrays(path)
        if metadata.get("format") != FORMAT:
            raise ValueError(f"its format is {metadata.get('format')!r}, not {FORMAT!r}")
        together = to_host(arrays["states"])
        ends = np.cumsum(counts, dtype=np.int64)
        wanted = int(ends[-1]) if counts else 0
        if len(together) != wanted:
            raise ValueError(f"it holds {len(together)} positions, its shard's texts have {wanted}")
        return np.split(together, ends[:-1]) if counts else []
    except (RuntimeError, ValueError, KeyError) as error:
        raise damaged(path, error) from None
