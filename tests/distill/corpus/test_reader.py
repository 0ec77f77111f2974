"""Given answers, and labels of given texts."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from backends import frees_at_once
from tiny import byte_model, byte_tokenizer, plain_tokens, random_model
from train_runs import refuse_system_messages
from writing_samples import decode

from redrafter_mlx.distill.corpus import reader as reader_module
from redrafter_mlx.distill.corpus.prompts.conversations import Conversation
from redrafter_mlx.distill.corpus.reader import Reader, continuations
from redrafter_mlx.target_model.model import Target


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_target_labels_are_its_greedy_continuations_of_the_given_text(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "FORKS", 2)
    model = random_model(name)
    target = Target(model)
    tokens, first = [5, 6, 7, 20, 21, 22, 23, 24], 3
    got = continuations(target, tokens, first, length=3)
    want = [plain_tokens(model, tokens[: first + j], 4) for j in range(len(tokens) - first)]
    assert got.tolist() == want


@frees_at_once
def test_target_labels_hold_the_keys_and_values_of_a_text_once() -> None:
    target = Target(random_model(num_attention_heads=16, num_key_value_heads=16, head_dim=64))
    tokens, length = [i % 90 for i in range(400)], 5
    cache = target.new_cache()
    target.append(mx.array([tokens]), cache, 0)
    once = sum(b.nbytes for b in cache.buffers)
    mx.eval(cache.buffers)
    del cache
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    continuations(target, tokens, 200, length)
    assert mx.get_peak_memory() - before < 5 * once


def test_given_answers_are_read_with_their_end_and_the_states_in_front() -> None:
    target, tokenizer = Target(byte_model()), byte_tokenizer()
    given = Conversation(("first", "second"), ("an answer", "another"))
    reader = Reader(target, tokenizer, [given], "data", 3)
    one, two = reader.write(0).texts
    assert tokenizer.decode(one.answer.tolist()) == "an answer<|im_end|>"
    assert tokenizer.decode(two.answer.tolist()) == "another<|im_end|>"
    assert decode(two).endswith("an answer<|im_end|>\n<|im_start|>user\nsecond<|im_end|>\n"
                                "<|im_start|>assistant\n")  # fmt: skip
    tokens = two.prompt + two.answer.tolist()
    whole = target.hidden(mx.array([tokens]), [None] * target.n_layers)[0]
    np.testing.assert_allclose(
        two.states, np.array(whole[len(two.prompt) - 1 : -1]), rtol=2e-3, atol=2e-3
    )
    assert two.labels is None


def test_given_answers_are_counted_as_they_are_read() -> None:
    given = [
        Conversation(("first", "second"), ("an answer", "another")),
        Conversation(("short",), ("",)),
        Conversation(("long",), ("x" * 300,)),
        Conversation(("last",), ("an end",)),
    ]
    reader = Reader(Target(byte_model()), byte_tokenizer(), given, "data", 3, max_tokens=200)
    shard = reader.write(0)
    assert set(shard.left_out) == {"answer too short", "text too long"}
    read = sum(len(text.answer) for text in shard.texts)
    assert reader.count_tokens(1_000) == read
    assert reader.count_tokens(read - 1) == read - 1


def test_given_conversations_that_the_template_refuses_are_left_out() -> None:
    tokenizer = byte_tokenizer()
    refuse_system_messages(tokenizer)
    given = [Conversation(("one",), ("an answer",), system) for system in (None, "be kind")]
    shard = Reader(Target(byte_model()), tokenizer, given, "data", 3).write(0)
    assert [decode(text) for text in shard.texts] == [
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    ]
    assert shard.left_out == {"prompt refused by the chat template": 1}
