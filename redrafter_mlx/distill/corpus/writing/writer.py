"""The corpus that the target writes, block by block.

A block is a batch of prompts and the target's answers to them. Block i depends only on i and the
options, not on which process writes it or when. So several processes can write a corpus, and it can
be interrupted and grow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.distill.corpus.filters import (
    MIN_ANSWER,
    NOTHING,
    REFUSED,
    Exclusions,
    loop_start,
)
from redrafter_mlx.distill.corpus.prompts.conversations import Conversation
from redrafter_mlx.distill.corpus.prompts.prompt_starters import draw_starters
from redrafter_mlx.distill.corpus.prompts.rendering import conversation_ids
from redrafter_mlx.distill.corpus.prompts.user_turns import TurnPrefix, UserTurns
from redrafter_mlx.distill.corpus.shards import HELD_OUT_EVERY, BlockProgress, Shard, Text
from redrafter_mlx.distill.corpus.writing.block_order import BlockOrder, in_share
from redrafter_mlx.distill.corpus.writing.generation import Written, write_answers
from redrafter_mlx.distill.options import WritingOptions
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.target_model.model import Target

_SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a careful expert. Answer precisely and say what you are not sure of.",
    "Answer briefly, in a few sentences.",
    "You are a patient teacher who explains step by step.",
    "You are a programmer who answers with working code and a short explanation.",
    "Answer in the form of a list where that helps.",
)
"""In one of eight blocks one of these replaces the template's own, so that others occur too."""


@dataclass(frozen=True)
class Writer:
    """Writes blocks of a corpus with the target."""

    target: Target
    tokenizer: TokenizerWrapper
    prompts: Sequence[Conversation]  # the user's prompts, none if the target writes all of them
    options: WritingOptions
    exclude: Exclusions = NOTHING  # questions that the target's own prompts must not match
    room: int | None = None  # bytes for the rows of a batch; None: all. Texts do not depend on it
    raw: bool = False  # whether prompts are plain texts to continue, without a chat template

    blocks: ClassVar[None] = None  # there is no last block

    def write(self, block: int, progress: BlockProgress | None = None) -> Shard:
        """Return the texts of one block, filtered; `progress` counts what is left out."""
        progress = progress or BlockProgress()
        key = mx.random.key(self.options.seed * 1_000_003 + block)
        write = self._write_own if self.order.is_own(block) else self._write_given
        return Shard(write(block, key, progress), progress.left_out)

    def held_out(self, block: int) -> bool:
        return self.order.held_out(block)

    def has_new_prompts(self, block: int) -> bool:
        return self.order.has_new_prompts(block)

    @cached_property
    def order(self) -> BlockOrder:
        return BlockOrder(self.prompts, self.options)

    def _write_given(self, block: int, key: mx.array, progress: BlockProgress) -> list[Text]:
        """Write answers to the next of the user's prompts, with other openings in each round."""
        round_, part = self.order.round_and_part(block)
        openings = tuple(n + 3 * round_ for n in self.options.openings)
        return self.converse(self.order.parts[part], openings, key, progress)

    def _write_own(self, block: int, key: mx.array, progress: BlockProgress) -> list[Text]:
        """Write the target's own prompts, after the opening of its chat template, and answers."""
        opt = self.options
        wanted, earlier = self.order.part_size, self.order.own_before(block)
        kind = earlier + earlier // HELD_OUT_EVERY  # so that held-out blocks are of all kinds
        message = _SYSTEM_MESSAGES[kind // 8 % len(_SYSTEM_MESSAGES)]
        system = message if kind % 8 == 5 and self.takes_system else None
        start = Conversation((), system=system)
        for_prompts, for_answers, for_more = mx.random.split(key, 3)
        if in_share(kind, opt.starter_share):
            starters = draw_starters(wanted * 5 // 4, f"{opt.seed} {block}")
            prefixes = [TurnPrefix(start, n, starter) for starter, n in starters.items()]
            temperature = opt.starter_temperature
        else:
            prefixes = [TurnPrefix(start, wanted * 3 // 2)]
            temperature = opt.temperature
        turns = self._user.draw(prefixes, temperature, for_prompts, progress)
        firsts = [Conversation((turn,), system=system) for some in turns for turn in some][:wanted]
        if not firsts:
            return []
        if kind % 4 != 3:
            return self.converse(firsts, opt.openings, for_answers, progress)
        return self.with_follow_ups(firsts, for_answers, for_more, progress)

    def with_follow_ups(
        self,
        firsts: list[Conversation],
        for_answers: mx.array,
        for_more: mx.array,
        progress: BlockProgress,
    ) -> list[Text]:
        """Write conversations of two user turns, both written by the target."""
        opt = self.options
        asked = [(first, self.render(first, 0)) for first in firsts]
        texts, answered = self._answer(asked, opt.openings, for_answers, progress)
        if not answered:
            return texts
        for_turns, for_second = mx.random.split(for_more)
        prefixes = [TurnPrefix(conversation) for conversation in answered]
        more = self._user.draw(prefixes, opt.temperature, for_turns, progress)
        seconds = [
            replace(first, turns=(*first.turns, turns[0]))
            for first, turns in zip(answered, more, strict=True)
            if turns
        ]
        return texts + self.converse(seconds, opt.openings, for_second, progress)

    def converse(
        self,
        conversations: Sequence[Conversation],
        openings: tuple[int, ...],
        key: mx.array,
        progress: BlockProgress,
    ) -> list[Text]:
        """Write answers to the user turns of conversations, from the first unanswered one on."""
        texts: list[Text] = []
        while conversations:
            asked: list[tuple[Conversation, list[int]]] = []
            for conversation in conversations:
                try:
                    prompt = self.render(conversation, len(conversation.answers))
                except BadInputError:
                    progress.left_out[REFUSED] += 1
                    continue
                if len(prompt) > self.options.max_prompt_tokens:
                    progress.left_out["prompt too long"] += 1
                else:
                    asked.append((conversation, prompt))
            if not asked:
                break
            key, noise = mx.random.split(key)
            more, answered = self._answer(asked, openings, noise, progress)
            texts += more
            conversations = [c for c in answered if len(c.answers) < len(c.turns)]
        return texts

    def _answer(
        self,
        asked: Sequence[tuple[Conversation, list[int]]],
        openings: tuple[int, ...],
        key: mx.array,
        progress: BlockProgress,
    ) -> tuple[list[Text], list[Conversation]]:
        """Write answers to conversations, given with their tokens, one for each of `openings`.

        Returns the texts worth training on, and the conversations whose first answer ended, with
        it.
        """
        written = write_answers(
            self.target,
            [prompt for _, prompt in asked],
            set(self.tokenizer.eos_token_ids),
            self.options.max_answer_tokens,
            openings=openings,
            temperature=self.options.opening_temperature,
            key=key,
            room=self.room,
            count=progress.count_answers,
        )
        answered = []
        for (conversation, prompt), first in zip(asked, written[:: len(openings)], strict=True):
            if first.ended:
                tokens = [*first.prompt, *first.answer.tolist()][len(prompt) : -1]
                answers = (*conversation.answers, self.tokenizer.decode(tokens))
                answered.append(replace(conversation, answers=answers))
        return self._filtered(written, progress.left_out), answered

    @property
    def _user(self) -> UserTurns:
        return UserTurns(self.target, self.tokenizer, self.exclude, self.room)

    def _filtered(self, written: Sequence[Written], left_out: Counter[str]) -> list[Text]:
        """Return the texts worth training on; an answer is cut where it begins to loop."""
        texts = []
        seen: set[bytes] = set()
        for text in written:
            start = loop_start(text.answer.tolist())
            if start is not None:
                left_out["answer cut at a loop"] += 1
            length = len(text.answer) if start is None else start
            identity = np.array(text.prompt[-32:] + text.answer[:length].tolist()).tobytes()
            if length < MIN_ANSWER:
                left_out["answer too short"] += 1
            elif identity in seen:
                left_out["answer twice"] += 1
            else:
                seen.add(identity)
                texts.append(text.text(self.target, length))
        return texts

    def render(self, conversation: Conversation, turn: int) -> list[int]:
        thinking = self.options.thinking
        return conversation_ids(self.tokenizer, conversation, turn, raw=self.raw, thinking=thinking)

    @cached_property
    def takes_system(self) -> bool:
        """Whether the chat template accepts a system message."""
        try:
            self.render(Conversation(("?",), system=_SYSTEM_MESSAGES[0]), 0)
        except BadInputError:
            return False
        return True
