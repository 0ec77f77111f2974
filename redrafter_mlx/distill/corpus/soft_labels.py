"""What others wrote, as text to learn from: the prompts, and texts that are only read.

What stands there is not what the target would have said, so its tokens are no labels. But at each
of them the target has its own expectation of the next, and that is learnt (paper, section 3.5:
distillation along the ground truth). Reading is several times faster than writing, and what people
write is more varied than what a small model answers.

What is read with a shard lies in a shard of the same form, in a folder beside it. It holds no
prompts that are those of earlier shards again, or are held out.
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
from redrafter_mlx.distill.corpus.conversations import Conversation
from redrafter_mlx.distill.corpus.filters import MIN_ANSWER
from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.corpus.teacher_forcing import states_along
from redrafter_mlx.target.model import Target
from redrafter_mlx.weights.chat import render_chat

_MOST_TOKENS = 512
"""Of a text that is only read; the rest is left out."""


@dataclass(frozen=True)
class Foreign:
    """What is read beside the answers that the target writes: their prompts, or other texts.

    texts: conversations that are only read, so many with each block; None for the prompts
    """

    texts: tuple[Conversation, ...] | None = None
    with_each: int = 126

    def path(self, shard: Path) -> Path:
        """Where what is read with a shard lies."""
        return shard.parent / self.folder / shard.name

    def read(
        self, target: Target, tokenizer: TokenizerWrapper, block: int, asked: Sequence[Text]
    ) -> list[Text]:
        """What is read with a block whose new prompts are those of `asked`."""
        if self.texts is None:
            whole = [_Seen(t.prompt, t.prompt + t.answer.tolist(), t.before) for t in asked]
        else:
            some = self.texts[block * self.with_each : (block + 1) * self.with_each]
            tokens = [_tokens(text, tokenizer)[:_MOST_TOKENS] for text in some]
            whole = [_Seen(each, each) for each in tokens]
        return _without_known(target, whole)

    def read_some(self, target: Target, tokenizer: TokenizerWrapper, texts: int) -> list[Text]:
        """So many of the texts, from all over them, to see how long reading takes."""
        given = self.texts or ()
        tried = given[:: max(1, len(given) // texts)][:texts]
        return Foreign(tried).read(target, tokenizer, 0, [])

    @cached_property
    def folder(self) -> str:
        """Its name, which differs for different texts."""
        if self.texts is None:
            return "prompts"
        said = json.dumps([asdict(text) for text in self.texts])
        return f"read-{sha256(said.encode()).hexdigest()[:16]}"


def _tokens(text: Conversation, tokenizer: TokenizerWrapper) -> list[int]:
    last = len(text.turns) - 1
    said = text.messages(last, text.answers)
    if len(text.answers) > last:
        said.append({"role": "assistant", "content": text.answers[last]})
    return render_chat(tokenizer, said, add_generation_prompt=False)


class _Seen(NamedTuple):
    """A text that others wrote.

    followed: its tokens with those that follow and are learnt otherwise
    states:   [tokens - 1, C] that chose its tokens from the second on; None if it has to
              be read for them
    """

    tokens: list[int]
    followed: list[int]
    states: np.ndarray | None = None


def _without_known(target: Target, whole: Sequence[_Seen]) -> list[Text]:
    """Texts that others wrote, without what an earlier one begins with.

    Returns:
      texts whose `prompt` is the part that is not new (at least one token) and whose `answer` is
      the rest
    """
    known: list[list[int]] = []
    found: list[tuple[_Seen, int]] = []
    for text in whole:
        new = max([1, *(common_prefix(other, text.tokens) for other in known)])
        if len(text.tokens) - new >= MIN_ANSWER:
            found.append((text, new))
        known.append(text.followed)
    unread = states_along(target, ((t.tokens, new) for t, new in found if t.states is None))
    D, texts = target.hidden_size, []
    for text, new in found:
        states = next(unread) if text.states is None else text.states[new - 1 :]
        contexts = states[:, :-D] if target.context_layers else None
        answer = np.array(text.tokens[new:], np.int32)
        texts.append(Text(text.tokens[:new], answer, states[:, -D:], contexts=contexts, own=False))
    return texts
