"""The corpus that the target writes, block by block.

A block is a batch of prompts and the target's answers to them. Block i depends only on i and the
options, not on which process writes it or when. So several processes can write a corpus, and it can
be interrupted and grow.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.distill.corpus.filters import MIN_ANSWER, NOTHING, Exclusions, loop_start
from redrafter_mlx.distill.corpus.generation import Written, write_answers
from redrafter_mlx.distill.corpus.prompts.conversations import Conversation
from redrafter_mlx.distill.corpus.prompts.prompt_starters import draw_starters
from redrafter_mlx.distill.corpus.prompts.user_turns import TurnPrefix, draw_user_turns
from redrafter_mlx.distill.corpus.shards import HELD_OUT_EVERY, Shard, Text
from redrafter_mlx.distill.options import WritingOptions
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.target.model import Target
from redrafter_mlx.weights.chat import render_chat

_SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a careful expert. Answer precisely and say what you are not sure of.",
    "Answer briefly, in a few sentences.",
    "You are a patient teacher who explains step by step.",
    "You are a programmer who answers with working code and a short explanation.",
    "Answer in the form of a list where that helps.",
)
"""In one of eight blocks one of these replaces the template's own, so that others occur too."""

_SORTED_BLOCKS = 8
"""Number of blocks within which prompts are sorted by length: little padding, still a mixture."""


@dataclass(frozen=True)
class Writer:
    """Writes blocks of a corpus with the target.

    prompts: the user's prompts, none if the target writes all of them
    exclude: questions that the target's own prompts must not match
    room:    bytes for the rows of a batch; None writes all rows of a block at once. The texts do
             not depend on it
    """

    target: Target
    tokenizer: TokenizerWrapper
    prompts: Sequence[Conversation]
    options: WritingOptions
    exclude: Exclusions = NOTHING
    room: int | None = None

    @property
    def blocks(self) -> None:
        """None, since there is no last block."""
        return None

    def write(self, block: int) -> Shard:
        """Return the texts of one block, filtered, and counts of what was left out."""
        left_out: Counter[str] = Counter()
        key = mx.random.key(self.options.seed * 1_000_003 + block)
        if self._is_own(block):
            texts = self._write_own(block, key, left_out)
        else:
            texts = self._write_given(block, key, left_out)
        return Shard(texts, left_out)

    def held_out(self, block: int) -> bool:
        """Whether a block is for evaluation, never for training: one in HELD_OUT_EVERY.

        The user's prompts in a held-out block are never in a training block, however often they are
        asked. Of a few prompts all are trained on, if the target writes others.
        """
        if self._is_own(block):
            return self._own_before(block) % HELD_OUT_EVERY == 0
        if self._own_share > 0 and self._parts < HELD_OUT_EVERY:
            return False
        return self._round_and_part(block)[1] % HELD_OUT_EVERY == 0

    def has_new_prompts(self, block: int) -> bool:
        """Whether the prompts of a block are in no earlier block."""
        return self._is_own(block) or self._round_and_part(block)[0] == 0

    def _is_own(self, block: int) -> bool:
        return _in_share(block, self._own_share)

    def _own_before(self, block: int) -> int:
        """Return the number of blocks before `block` whose prompts the target writes."""
        return _count_in_share(block, self._own_share)

    @property
    def _own_share(self) -> float:
        return self.options.own_share if self.prompts else 1.0

    def _round_and_part(self, block: int) -> tuple[int, int]:
        """Return how often all the user's prompts were asked before, and which part is next."""
        return divmod(block - self._own_before(block), self._parts)

    @property
    def _part_size(self) -> int:
        """Number of the user's prompts in a block."""
        return self.options.batch // len(self.options.openings)

    @property
    def _parts(self) -> int:
        """Number of blocks in which all the user's prompts are asked once."""
        return -(-len(self.prompts) // self._part_size)

    def _write_given(self, block: int, key: mx.array, left_out: Counter[str]) -> list[Text]:
        """Write answers to the next of the user's prompts, with other openings in each round."""
        opt, size = self.options, self._part_size
        round_, part = self._round_and_part(block)
        order = list(range(len(self.prompts)))
        random.Random(opt.seed).shuffle(order)
        group, within = divmod(part, _SORTED_BLOCKS)
        span = order[group * _SORTED_BLOCKS * size : (group + 1) * _SORTED_BLOCKS * size]
        span.sort(key=lambda i: sum(map(len, self.prompts[i].turns)))
        blocks = [span[at : at + size] for at in range(0, len(span), size)]
        random.Random(f"{opt.seed} {group}").shuffle(blocks)  # held-out ones are not the shortest
        chosen = [self.prompts[i] for i in blocks[within]]
        openings = tuple(n + 3 * round_ for n in opt.openings)
        return self._converse(chosen, openings, key, left_out)

    def _write_own(self, block: int, key: mx.array, left_out: Counter[str]) -> list[Text]:
        """Write the target's own prompts, after the opening of its chat template, and answers."""
        opt = self.options
        wanted = opt.batch // len(opt.openings)
        earlier = self._own_before(block)
        kind = earlier + earlier // HELD_OUT_EVERY  # so that held-out blocks are of all kinds
        message = _SYSTEM_MESSAGES[kind // 8 % len(_SYSTEM_MESSAGES)]
        system = message if kind % 8 == 5 and self._takes_system else None
        for_prompts, for_answers, for_more = mx.random.split(key, 3)
        if _in_share(kind, opt.starter_share):
            starters = draw_starters(wanted * 5 // 4, f"{opt.seed} {block}")
            prefixes = [TurnPrefix([], system, n, starter) for starter, n in starters.items()]
            temperature = opt.starter_temperature
        else:
            prefixes = [TurnPrefix([], system, wanted * 3 // 2)]
            temperature = opt.temperature
        turns = self._turns(prefixes, temperature, for_prompts, left_out)
        firsts = [Conversation((turn,), system=system) for some in turns for turn in some][:wanted]
        if not firsts:
            return []
        if kind % 4 != 3:
            return self._converse(firsts, opt.openings, for_answers, left_out)
        return self._with_follow_ups(firsts, for_answers, for_more, left_out)

    def _with_follow_ups(
        self,
        firsts: list[Conversation],
        for_answers: mx.array,
        for_more: mx.array,
        left_out: Counter[str],
    ) -> list[Text]:
        """Write conversations of two user turns, both written by the target."""
        opt = self.options
        prompts = [self._render(c.messages(0, [])) for c in firsts]
        written = write_answers(
            self.target, prompts, self._eos,
            opt.max_answer_tokens, openings=opt.openings,
            temperature=opt.opening_temperature, key=for_answers, room=self.room,
        )  # fmt: skip
        answered = [
            (c, self._spoken(w, len(prompt)))
            for c, prompt, w in zip(firsts, prompts, written[:: len(opt.openings)], strict=True)
            if w.ended
        ]
        texts = self._filtered(written, left_out)
        if not answered:
            return texts
        for_turns, for_second = mx.random.split(for_more)
        prefixes = [TurnPrefix([c.turns[0], answer], c.system) for c, answer in answered]
        more = self._turns(prefixes, opt.temperature, for_turns, left_out)
        seconds = [
            (Conversation((*c.turns, turn[0]), (answer,), c.system))
            for (c, answer), turn in zip(answered, more, strict=True)
            if turn
        ]
        return texts + self._converse(seconds, self.options.openings, for_second, left_out)

    def _converse(
        self,
        conversations: Sequence[Conversation],
        openings: tuple[int, ...],
        key: mx.array,
        left_out: Counter[str],
    ) -> list[Text]:
        """Write answers to the user turns of conversations, from the first unanswered one on."""
        opt = self.options
        answers = [list(c.answers) for c in conversations]
        texts: list[Text] = []
        live = list(range(len(conversations)))
        while live:
            prompts: dict[int, list[int]] = {}
            for i in live:
                messages = conversations[i].messages(len(answers[i]), answers[i])
                try:
                    ids = self._render(messages)
                except BadInputError:
                    left_out["prompt refused by the chat template"] += 1
                    continue
                if len(ids) > opt.max_prompt_tokens:
                    left_out["prompt too long"] += 1
                else:
                    prompts[i] = ids
            if not prompts:
                break
            key, noise = mx.random.split(key)
            written = write_answers(
                self.target, list(prompts.values()), self._eos, opt.max_answer_tokens,
                openings=openings, temperature=opt.opening_temperature, key=noise,
                room=self.room,
            )  # fmt: skip
            texts += self._filtered(written, left_out)
            live = []
            for n, i in enumerate(prompts):
                first = written[n * len(openings)]
                answers[i].append(self._spoken(first, len(prompts[i])))
                if first.ended and len(answers[i]) < len(conversations[i].turns):
                    live.append(i)
        return texts

    def _spoken(self, written: Written, prompt: int) -> str:
        """Return an answer's text with its opening, which follows `prompt` tokens of the prompt."""
        tokens = [*written.prompt[prompt:], *written.answer.tolist()]
        text: str = self.tokenizer.decode(tokens[:-1] if written.ended else tokens)
        return text

    def _turns(
        self,
        prefixes: Sequence[TurnPrefix],
        temperature: float,
        key: mx.array,
        left_out: Counter[str],
    ) -> list[list[str]]:
        """Draw the target's own user turns after each of `prefixes`."""
        return draw_user_turns(
            self.target,
            self.tokenizer,
            prefixes,
            temperature,
            self.exclude,
            key,
            left_out,
            self.room,
        )

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

    def _render(self, messages: list[dict[str, str]]) -> list[int]:
        return render_chat(self.tokenizer, messages, thinking=self.options.thinking)

    @cached_property
    def _takes_system(self) -> bool:
        """Whether the chat template accepts a system message."""
        messages = Conversation(("?",), system=_SYSTEM_MESSAGES[0]).messages(0, [])
        try:
            self._render(messages)
        except BadInputError:
            return False
        return True

    @property
    def _eos(self) -> set[int]:
        return set(self.tokenizer.eos_token_ids)


def told_to_think(tokenizer: TokenizerWrapper, options: WritingOptions) -> bool | None:
    """Return `options.thinking`, or None if a chat template renders the same without it."""
    asked = [{"role": "user", "content": "?"}]
    try:
        told = render_chat(tokenizer, asked, thinking=options.thinking)
        return None if told == render_chat(tokenizer, asked) else options.thinking
    except BadInputError:  # the texts are left out, with this reason
        return None


def _count_in_share(block: int, share: float) -> int:
    """Return how many blocks before `block` belong to an evenly spread share of all blocks."""
    return int(block * share + 1e-9)


def _in_share(block: int, share: float) -> bool:
    """Whether `block` belongs to that share."""
    return _count_in_share(block + 1, share) > _count_in_share(block, share)
