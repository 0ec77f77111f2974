"""Texts that the target reads and did not write: the prompts, and files of other texts.

Their tokens are not labels, because the target might have written others. But the target's
next-token probabilities at each of them are soft labels (paper, section 3.5: distillation along the
ground truth). Reading is several times faster than writing, and text written by people is more
varied than a small model's answers.

The texts read with a block are in a shard of the same format, in a folder next to it. They include
no prompts that an earlier block had, or that are held out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.decoding.cache.prefix_cache import common_prefix
from redrafter_mlx.distill.corpus.filters import MIN_ANSWER
from redrafter_mlx.distill.corpus.hidden_states import teacher_forced_states
from redrafter_mlx.distill.corpus.prompts.conversations import Conversation
from redrafter_mlx.distill.corpus.prompts.rendering import conversation_ids
from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.target_model.model import Target

_SAMPLED = 32  # number of texts whose mean length is taken for that of all

_MAX_TOKENS = 512  # maximum number of tokens of a text that is only read; later tokens are left out


@dataclass(frozen=True)
class ReadTexts:
    """Texts read in addition to the answers that the target writes: their prompts, or others."""

    texts: tuple[Conversation, ...] | None = None  # only read; None for the prompts
    per_block: int = 126  # number of them that are read with each block, as many as it has answers
    raw: bool = False  # whether the texts are plain, without a chat template

    def path(self, shard: Path) -> Path:
        return shard.parent / self.folder / shard.name

    def of_block(
        self, target: Target, tokenizer: TokenizerWrapper, block: int, asked: Sequence[Text]
    ) -> list[Text]:
        """Return the texts that are read with a block; `asked` are those with its new prompts."""
        if self.texts is None:
            return _new_parts(target, asked)
        read, nothing = list[Text](), np.zeros(0, np.int32)
        for text in self.texts[block * self.per_block : (block + 1) * self.per_block]:
            with suppress(BadInputError):  # the chat template refuses it
                read.append(Text(self._tokens(text, tokenizer)[:_MAX_TOKENS], nothing, nothing))
        return _new_parts(target, read)

    def mean_length(self, tokenizer: TokenizerWrapper) -> float:
        """Return the mean number of tokens that are read of a text, of a sample."""
        lengths, given = list[int](), self.texts or ()
        for text in given[:: max(1, len(given) // _SAMPLED)][:_SAMPLED]:
            with suppress(BadInputError):  # the chat template refuses it
                lengths.append(min(_MAX_TOKENS, len(self._tokens(text, tokenizer))))
        return sum(lengths) / max(1, len(lengths))

    def _tokens(self, text: Conversation, tokenizer: TokenizerWrapper) -> list[int]:
        last = len(text.turns) - 1
        return conversation_ids(tokenizer, text, last, answered=True, raw=self.raw)

    @cached_property
    def folder(self) -> str:
        """Name of the folder, which differs for different texts."""
        if self.texts is None:
            return "prompts"
        kind = [self.per_block, *(["raw"] if self.raw else [])]
        content = json.dumps([*kind, *(asdict(text) for text in self.texts)])
        return f"read-{sha256(content.encode()).hexdigest()[:16]}"


def _new_parts(target: Target, read: Sequence[Text]) -> list[Text]:
    """Return the prompts of texts, without the prefixes that they share with earlier texts.

    A prefix (at least one token) is the `prompt` of a text that is returned, the rest its `answer`.
    """
    known: list[list[int]] = []
    found: list[tuple[Text, int]] = []
    for text in read:
        new = max([1, *(common_prefix(other, text.prompt) for other in known)])
        if len(text.prompt) - new >= MIN_ANSWER:
            found.append((text, new))
        known.append(text.prompt + text.answer.tolist())
    computed = teacher_forced_states(
        target, ((text.prompt, new) for text, new in found if text.prompt_states is None)
    )
    texts = []
    for text, new in found:
        states = next(computed) if text.prompt_states is None else text.prompt_states[new - 1 :]
        answer = np.array(text.prompt[new:], np.int32)
        texts.append(Text.of(target, text.prompt[:new], answer, states, hard_labels=False))
    return texts
