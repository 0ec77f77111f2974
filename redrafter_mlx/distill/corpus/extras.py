"""What else of the target a drafter's form needs beside the texts of a corpus.

The texts and the hidden states that chose their tokens serve drafters of every form. What only
some forms read lies in folders beside them, under the names of the shards it belongs to, so that
it can be added to a corpus that is there already:

    prompts/     the prompts' own tokens as texts to learn from, see foreign.py
    read-KEY/    the same and other texts that are only read
    states-I-J/  inputs of context layers, see contexts.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.distill.corpus.layer_inputs import (
    contexts_path,
    read_contexts,
    save_contexts,
    with_contexts,
    with_saved_contexts,
)
from redrafter_mlx.distill.corpus.shards import Shard, Text, load_shard, save_shard
from redrafter_mlx.distill.corpus.soft_labels import Foreign
from redrafter_mlx.drafting.recurrent_config import DrafterConfig
from redrafter_mlx.target.model import Target


@dataclass(frozen=True)
class Extras:
    """What is kept for one form of drafter.

    context: layers whose inputs are
    foreign: what others wrote, and is learnt from too
    """

    context: tuple[int, ...] = ()
    foreign: tuple[Foreign, ...] = ()

    @classmethod
    def of(cls, config: DrafterConfig, foreign: Sequence[Foreign] = ()) -> Extras:
        return cls(config.context_layers, tuple(foreign))

    def files(self, shard: Path) -> list[Path]:
        """Where it lies for a shard."""
        return [
            *([contexts_path(shard, self.context)] if self.context else []),
            *(
                file
                for path in self.foreign_shards(shard)
                for file in (path, *self.each.files(path))
            ),
        ]

    def foreign_shards(self, shard: Path) -> list[Path]:
        """What was read with a shard: shards themselves, with all the rest beside them."""
        return [foreign.path(shard) for foreign in self.foreign]

    def keep(
        self,
        target: Target,
        tokenizer: TokenizerWrapper,
        texts: Sequence[Text],
        shard: Path,
        block: int,
        *,
        new_prompts: bool = True,
    ) -> None:
        """Save what was kept while the texts were written, in front of the shard itself."""
        self._keep_contexts(texts, shard, target.dtype)
        for foreign in self.foreign:
            if foreign.texts is None and all(text.before is not None for text in texts):
                asked = texts if new_prompts else []
                read = foreign.read(target, tokenizer, block, asked)
                self._save(read, foreign.path(shard), target.dtype)

    def add(
        self,
        target: Target,
        tokenizer: TokenizerWrapper,
        shard: Path,
        block: int,
        *,
        new_prompts: bool = True,
    ) -> None:
        """Read what is missing beside the shard of a block: one more pass over its texts.

        new_prompts: whether its prompts are to be learnt from, if any are
        """
        if all(path.exists() for path in self.files(shard)):
            return
        texts = load_shard(shard).texts
        if self.context and not contexts_path(shard, self.context).exists():
            found = read_contexts(target.reading(self.context), texts)
            save_contexts(found, contexts_path(shard, self.context), target.dtype)
        for foreign in self.foreign:
            path = foreign.path(shard)
            if not path.exists():
                asked = texts if new_prompts else []
                read = foreign.read(target.reading(self.context), tokenizer, block, asked)
                self._save(read, path, target.dtype)
            self.each.add(target, tokenizer, path, block)

    def load(self, shard: Path) -> list[Text]:
        """The texts of a shard, with what is kept for each.

        Raises DamagedFileError, naming the file, for what is not whole.
        """
        texts = load_shard(shard).texts
        if self.context:
            texts = with_saved_contexts(texts, contexts_path(shard, self.context))
        return texts

    def read(self, target: Target, texts: Sequence[Text]) -> list[Text]:
        """The same for texts that are in no corpus."""
        return with_contexts(target.reading(self.context), texts) if self.context else list(texts)

    def _keep_contexts(self, texts: Sequence[Text], shard: Path, dtype: mx.Dtype) -> None:
        contexts = [text.contexts for text in texts if text.contexts is not None]
        if self.context and len(contexts) == len(texts):
            save_contexts(contexts, contexts_path(shard, self.context), dtype)

    def _save(self, read: list[Text], path: Path, dtype: mx.Dtype) -> None:
        """Write what others wrote as a shard, with the contexts that came with it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._keep_contexts(read, path, dtype)
        save_shard(Shard(read, {}), path, {}, dtype)

    @property
    def each(self) -> Extras:
        """What is kept for each shard, those of texts that others wrote among them."""
        return replace(self, foreign=())
