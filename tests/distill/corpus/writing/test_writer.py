"""Blocks of a corpus depend on their number alone; their prompts take turns."""

from __future__ import annotations

import numpy as np
import pytest
from tiny import byte_model, byte_tokenizer
from train_runs import refuse_system_messages
from writing_samples import THINKS, decode, options

from redrafter_mlx.distill.corpus.prompts.conversations import Conversation
from redrafter_mlx.distill.corpus.writing.generation import Written
from redrafter_mlx.distill.corpus.writing.writer import Writer
from redrafter_mlx.distill.options import OPENINGS
from redrafter_mlx.target_model.model import Target


def test_blocks_depend_on_their_number_alone() -> None:
    tokenizer, target = byte_tokenizer(), Target(byte_model())
    prompts = [Conversation((f"prompt {i}",)) for i in range(7)]
    writer = Writer(target, tokenizer, prompts, options(own_share=0.5))
    backwards = {b: writer.write(b) for b in (5, 4, 0)}
    for b in (0, 4, 5):
        again = writer.write(b)
        assert [t.prompt for t in again.texts] == [t.prompt for t in backwards[b].texts]
        assert all(
            np.array_equal(x.answer, y.answer)
            for x, y in zip(again.texts, backwards[b].texts, strict=True)
        )


def test_given_prompts_are_all_asked_before_any_is_asked_again() -> None:
    tokenizer, target = byte_tokenizer(), Target(byte_model())
    prompts = [Conversation((f"prompt {i}",)) for i in range(5)]
    writer = Writer(target, tokenizer, prompts, options(own_share=0.0, openings=OPENINGS))
    asked = [
        {i for i in range(5) for t in writer.write(b).texts if f"prompt {i}<" in decode(t)}
        for b in range(6)
    ]

    assert set().union(*asked[:3]) == set(range(5))
    assert asked[0] == asked[3]  # the second round, with other openings
    assert not asked[0] & asked[1]
    assert [writer.has_new_prompts(b) for b in range(6)] == [True] * 3 + [False] * 3


def test_later_turns_follow_the_answers_to_the_earlier_ones() -> None:
    tokenizer, target = byte_tokenizer(), Target(byte_model())
    given = Conversation(("first", "second"), ("an answer",), "be brief")
    writer = Writer(target, tokenizer, [given], options(own_share=0.0, batch=1, openings=(0,)))
    (text,) = writer.write(0).texts
    assert decode(text) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nfirst<|im_end|>\n"
        "<|im_start|>assistant\nan answer<|im_end|>\n<|im_start|>user\nsecond<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_template_that_refuses_system_messages_gets_none() -> None:
    tokenizer = byte_tokenizer()
    refuse_system_messages(tokenizer)
    given = [Conversation(("one",)), Conversation(("two",), system="be kind")]
    writer = Writer(Target(byte_model()), tokenizer, given, options(own_share=0.5))
    assert not writer.takes_system
    for block in range(1, 12, 2):
        writer.write(block)
    shard = writer.write(0)
    assert shard.texts
    assert shard.left_out["prompt refused by the chat template"] == 1


@pytest.mark.parametrize(("ends_in_opening", "said"), [(False, "abc"), (True, "a")])
def test_a_later_turn_follows_the_whole_answer_before_it(
    monkeypatch: pytest.MonkeyPatch, ends_in_opening: bool, said: str
) -> None:
    """Its opening too, which is stored with the prompt, and not the mark of its end as text."""
    model, tokenizer = byte_model(), byte_tokenizer()
    end = tokenizer.encode("<|im_end|>", add_special_tokens=False)[0]

    def answered(target: Target, prompts: list[list[int]], *_: object, **__: object) -> object:
        answer = np.array([*tokenizer.encode("bc", add_special_tokens=False), end], np.int32)
        opening = tokenizer.encode("a", add_special_tokens=False)
        states = np.zeros((3, target.hidden_size), np.float32)
        if ends_in_opening:
            return [Written([*p, *opening, end], answer[:0], states, True, states) for p in prompts]
        return [Written([*p, *opening], answer, states, True, states[:1]) for p in prompts]

    monkeypatch.setattr("redrafter_mlx.distill.corpus.writing.writer.write_answers", answered)
    given = [Conversation(("first", "second"))]
    writer = Writer(Target(model), tokenizer, given, options(own_share=0.0, openings=(1,)))
    shown: list[list[dict[str, str]]] = []
    render = Writer.render
    monkeypatch.setattr(
        Writer,
        "render",
        lambda self, of, turn: shown.append(of.messages(turn)) or render(self, of, turn),
    )
    writer.write(0)
    assert [m["content"] for m in shown[-1]] == ["first", said, "second"]


@pytest.mark.parametrize("thinking", [False, True])
def test_a_target_that_can_think_first_does_so_only_if_asked(thinking: bool) -> None:
    tokenizer, target = byte_tokenizer(), Target(byte_model())
    tokenizer.chat_template += THINKS
    prompts = [Conversation(("prompt",))]
    told = options(own_share=0.0, openings=(0,), thinking=thinking)
    (text,) = Writer(target, tokenizer, prompts, told).write(0).texts
    assert decode(text).endswith("assistant\n<think>") is thinking
