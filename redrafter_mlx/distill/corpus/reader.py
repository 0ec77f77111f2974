"""Finished conversations as a corpus: the target reads answers that it did not write.

The hidden states come from one pass over each text. The labels at each position are either the
answer as it stands (ground truth), or what the target would generate from there (paper, section
3.5: distillation in the ground truth's context).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.distill.corpus.filters import MIN_ANSWER, REFUSED
from redrafter_mlx.distill.corpus.hidden_states import teacher_forced_states
from redrafter_mlx.distill.corpus.prompts.conversations import Conversation
from redrafter_mlx.distill.corpus.prompts.rendering import conversation_ids, split_plain
from redrafter_mlx.distill.corpus.shards import HELD_OUT_EVERY, BlockProgress, Shard, Text
from redrafter_mlx.distill.options import Labels
from redrafter_mlx.errors import BadInputError, UnsupportedModelError
from redrafter_mlx.target_model.model import Target

FORKS = 64
"""Number of continuations that the target generates in one call."""


@dataclass(frozen=True)
class Reader:
    """Reads blocks of conversations with the target; the counterpart of `Writer`."""

    target: Target
    tokenizer: TokenizerWrapper
    conversations: Sequence[Conversation]
    labels: Labels  # whether the labels are the target's continuations or the answers
    length: int  # T, number of tokens of each continuation, if the labels are `target`
    batch: int = 32  # number of conversations in a block
    max_tokens: int = 1024  # longer texts are left out; plain ones are cut
    raw: bool = False  # whether the texts are plain, without a chat template

    def __post_init__(self) -> None:
        """Raise UnsupportedModelError if the target cannot continue a text at every position."""
        if self.labels == "target" and self.target.states:
            raise UnsupportedModelError(
                f"{self.target.model_type} keeps recurrent states, so it cannot continue given "
                f"texts at every position; train with --labels answers"
            )

    @property
    def blocks(self) -> int:
        return -(-len(self.conversations) // self.batch)

    def held_out(self, block: int) -> bool:
        """Whether a block is for evaluation, never for training."""
        return block % HELD_OUT_EVERY == 0

    def has_new_prompts(self, _block: int) -> bool:
        """Return True: each conversation is read once."""
        return True

    def write(self, block: int, progress: BlockProgress | None = None) -> Shard:
        """Return the texts of one block; `progress` counts while it is being read."""
        progress, texts = progress or BlockProgress(), list[Text]()
        some = self.conversations[block * self.batch : (block + 1) * self.batch]
        for prompt, answer in self._usable(some, progress.left_out):
            texts.append(self._read(prompt, answer))
            progress.count_answers(len(answer))
        return Shard(texts, progress.left_out)

    def count_tokens(self, max_tokens: int) -> int:
        """Count the tokens of answers that would be read, up to `max_tokens`, without reading."""
        found = 0
        for _, answer in self._usable(self.conversations, Counter()):
            if found >= max_tokens:
                break
            found += len(answer)
        return min(found, max_tokens)

    def _usable(
        self, conversations: Iterable[Conversation], left_out: Counter[str]
    ) -> Iterator[tuple[list[int], list[int]]]:
        """Yield prompt and answer of each text that can be trained on; count the others."""
        for conversation in conversations:
            plain = self.raw and not conversation.answers
            for turn in range(1 if plain else len(conversation.answers)):
                try:
                    prompt, answer = self._split(conversation, turn)
                except BadInputError:
                    left_out[REFUSED] += 1
                    continue
                if answer is None:
                    left_out["template shows an answer otherwise"] += 1
                elif len(answer) < MIN_ANSWER:
                    left_out["answer too short"] += 1
                elif len(prompt) + len(answer) > self.max_tokens:
                    left_out["text too long"] += 1
                else:
                    yield prompt, answer

    def _split(self, conversation: Conversation, turn: int) -> tuple[list[int], list[int] | None]:
        """Return the tokens before an answer, and the answer's up to the end of its turn.

        The answer is None if the template renders the turns before it differently with it.
        """
        prompt, whole = (
            conversation_ids(self.tokenizer, conversation, turn, answered=answered, raw=self.raw)
            for answered in (False, True)
        )
        if self.raw:
            return split_plain(prompt, whole[: self.max_tokens])
        if whole[: len(prompt)] != prompt:
            return prompt, None
        answer = whole[len(prompt) :]
        ends = [i for i, token in enumerate(answer) if token in self.tokenizer.eos_token_ids]
        return prompt, answer[: ends[0] + 1] if ends else answer

    def _read(self, prompt: list[int], answer: list[int]) -> Text:
        tokens, first, labels = prompt + answer, len(prompt), None
        (states,) = teacher_forced_states(self.target, [(tokens, 1)])
        if self.labels == "target":
            labels = continuations(self.target, tokens, first, self.length)
        return Text.of(
            self.target,
            prompt,
            np.array(answer, np.int32),
            states[first - 1 :],
            labels,
            prompt_states=states[: first - 1],
        )


def continuations(target: Target, tokens: list[int], first: int, length: int) -> np.ndarray:
    """Return [A, length + 1] int32: the target's next tokens at each position from `first` on.

    The continuations are forks of one text, whose keys and values are in memory once.
    """
    cache, read = target.new_cache(whole=True), len(tokens) - 1
    states = target.append(mx.array([tokens[:-1]]), cache, 0)[0, first - 1 :]
    found = []
    for at in range(0, states.shape[0], FORKS):
        some = states[at : at + FORKS]
        positions = mx.arange(first + at, first + at + some.shape[0], dtype=mx.int32)
        made = [mx.argmax(target.logits(some[None])[0], axis=-1).astype(mx.int32)]
        for ahead in range(length):
            cache.plan_forks(positions, ahead, read)
            hidden = target.hidden(made[-1][None], cache.layers)
            made.append(mx.argmax(target.logits(hidden)[0], axis=-1).astype(mx.int32))
            mx.async_eval(made[-1], *cache.buffers)
        found.append(np.array(mx.stack(made, axis=1)))
    return np.concatenate(found)
