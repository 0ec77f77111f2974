"""Turns of users that the target draws."""

from __future__ import annotations

import mlx.core as mx
import pytest
from tiny import byte_model, byte_tokenizer, plain_tokens, random_model
from writing_samples import PROMPTS

from redrafter_mlx.distill.corpus.prompts.conversations import Conversation
from redrafter_mlx.distill.corpus.prompts.prompt_starters import PROMPT_STARTERS, draw_starters
from redrafter_mlx.distill.corpus.prompts.user_turns import TurnPrefix, UserTurns
from redrafter_mlx.distill.corpus.shards import BlockProgress
from redrafter_mlx.distill.corpus.writing.generation import write_turns
from redrafter_mlx.target_model.model import Target


def test_drawn_turns_repeat_with_their_key_and_differ_between_rows() -> None:
    target = Target(random_model())
    ends = range(15)
    draw = [write_turns(target, [[1, 2]], [6], ends, 12, 2.0, mx.random.key(k)) for k in (1, 1, 2)]
    assert draw[0] == draw[1] != draw[2]
    assert len({tuple(turn) for turn in draw[0][0]}) == len(draw[0][0]) > 1
    assert not any(token in ends for turn in draw[0][0] for token in turn)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_turns_drawn_together_go_on_from_their_own_prefix(name: str) -> None:
    """At a temperature near 0, so that plain decoding gives the expected turns."""
    model = random_model(name)
    counts = [3, 0, 2]
    plain = [plain_tokens(model, prompt, 20) for prompt in PROMPTS]
    ends = {tokens[5] for tokens in plain}
    drawn = write_turns(Target(model), PROMPTS, counts, ends, 20, 1e-4, mx.random.key(5))
    for tokens, count, turns in zip(plain, counts, drawn, strict=True):
        stop = next(i for i, token in enumerate(tokens) if token in ends)
        assert turns == ([tokens[:stop]] if stop else []) * count


def test_prompts_continue_their_starters_and_each_starter_comes_in_turn() -> None:
    tokenizer, target = byte_tokenizer(), Target(byte_model())
    twice = draw_starters(2 * len(PROMPT_STARTERS), "seed")
    assert set(twice) == set(PROMPT_STARTERS)
    assert set(twice.values()) == {2}
    assert draw_starters(9, "a") == draw_starters(9, "a") != draw_starters(9, "b")
    said = Conversation(("hi",), ("ho",), "be brief")
    openings = [TurnPrefix(Conversation(()), 40, "Compare"), TurnPrefix(said, 20)]
    block = BlockProgress()
    begun, free = UserTurns(target, tokenizer).draw(openings, 5.0, mx.random.key(0), block)
    assert all(turn.startswith("Compare") for turn in begun)
    assert not any(turn.startswith("Compare") for turn in free)
    assert len(begun) + len(free) + block.left_out.total() == 60
    assert begun
