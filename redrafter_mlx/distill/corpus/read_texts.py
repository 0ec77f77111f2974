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
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.decoding.prefix_cache import common_prefix
from redrafter_mlx.distill.corpus.filters import MIN_ANSWER
from redrafter_mlx.distill.corpus.hidden_states import teacher_forced_states
from redrafter_mlx.distill.corpus.prompts.conversations import Conversation
from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.target.model import Target
from redrafter_mlx.weights.chat import render_chat

_MAX_TOKENS = 512
"""Maximum number of tokens of a text that is only read; later tokens are left out."""


@dataclass(frozen=True)
class ReadTexts:
    """Texts read in addition to the answers that the target writes: their prompts, or others.

    texts:     conversations that are only read; None for the prompts
    per_block: number of them that are read with each block
    """

    texts: tuple[Conversation, ...] | None = None
    per_block: int = 126

    def path(self, shard: Path) -> Path:
        """Return the path of the texts read with a shard."""
        return shard.parent / self.folder / shard.name

    def of_block(
        self, target: Target, tokenizer: TokenizerWrapper, block: int, asked: Sequence[Text]
    ) -> list[Text]:
        """Return the texts that are read with a block; `asked` are those with its new prompts."""
        if self.texts is None:
            whole = [_Read(t.prompt, t.prompt + t.answer.tolist(), t.prompt_states) for t in asked]
        else:
            some = self.texts[block * self.per_block : (block + 1) * self.per_block]
            tokens = [_tokens(text, tokenizer)[:_MAX_TOKENS] for text in some]
            whole = [_Read(each, each) for each in tokens]
        return _new_parts(target, whole)

    def sample(self, target: Target, tokenizer: TokenizerWrapper, texts: int) -> list[Text]:
        """Read a sample of `texts` texts, evenly spread, to measure how long reading takes."""
        given = self.texts or ()
        tried = given[:: max(1, len(given) // texts)][:texts]
        return ReadTexts(tried).of_block(target, tokenizer, 0, [])

    @cached_property
    def folder(self) -> str:
        """Name of the folder, which differs for different texts."""
        if self.texts is None:
            return "prompts"
        content = json.dumps([asdict(text) for text in self.texts])
        return f"read-{sha256(content.encode()).hexdigest()[:16]}"


def _tokens(text: Conversation, tokenizer: TokenizerWrapper) -> list[int]:
    last = len(text.turns) - 1
    messages = text.messages(last, text.answers)
    if len(text.answers) > last:
        messages.append({"role": "assistant", "content": text.answers[last]})
    return render_chat(tokenizer, messages, add_generation_prompt=False)


class _Read(NamedTuple):
    """A text that the target reads.

    whole:  its tokens and any answer after them, which has separate labels
    states: [tokens - 1, C], the states that chose its tokens from the second on; None if not
            computed yet
    """

    tokens: list[int]
    whole: list[int]
    states: np.ndarray | None = None


def _new_parts(target: Target, read: Sequence[_Read]) -> list[Text]:
    """Return the texts, without the prefixes that they share with earlier ones.

    Returns:
      texts whose `prompt` is the shared prefix (at least one token) and whose `answer` is the new
      part
    """
    known: list[list[int]] = []
    found: list[tuple[_Read, int]] = []
    for text in read:
        new = max([1, *(common_prefix(other, text.tokens) for other in known)])
        if len(text.tokens) - new >= MIN_ANSWER:
            found.append((text, new))
        known.append(text.whole)
    computed = teacher_forced_states(
        target, ((text.tokens, new) for text, new in found if text.states is None)
    )
    texts = []
    for text, new in found:
        states = next(computed) if text.states is None else text.states[new - 1 :]
        answer = np.array(text.tokens[new:], np.int32)
        texts.append(Text.of(target, text.tokens[:new], answer, states, hard_labels=False))
    return texts
