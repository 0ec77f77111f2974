"""Texts that are only read: each is read once, with the target's probabilities as labels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hybrids import hybrid_model
from tiny import byte_model, byte_tokenizer, random_model
from train_runs import refuse_system_messages

from redrafter_mlx.distill.corpus.examples import lay_out
from redrafter_mlx.distill.corpus.extras import Extras
from redrafter_mlx.distill.corpus.hidden_states import teacher_forced_states
from redrafter_mlx.distill.corpus.prompts.conversations import Conversation
from redrafter_mlx.distill.corpus.read_texts import ReadTexts
from redrafter_mlx.distill.corpus.shards import Shard, Text, load_shard, save_shard
from redrafter_mlx.distill.corpus.writing.generation import write_answers
from redrafter_mlx.target_model.model import Target

HEAD = [90, 91, 92]
PROMPTS = [
    [*HEAD, 5, 6, 7, 8, 9],
    [*HEAD, 5, 6, 7, 8, 9],  # repeated, for another answer
    [*HEAD, 5, 6, 30, 31, 32, 33],
    [*HEAD, 5, 6],  # a prefix of earlier texts
    [*HEAD, 40, 41],  # too few new tokens
]


def texts(target: Target) -> list[Text]:
    return [w.text(target) for w in write_answers(target, PROMPTS, [], 6)]


@pytest.mark.parametrize("layers", [(), (0, 1)])
@pytest.mark.parametrize("model", [random_model("qwen3"), hybrid_model("qwen3_5")])
def test_teacher_forced_states_are_those_of_each_text_alone(
    model: nn.Module, layers: tuple[int, ...]
) -> None:
    target = Target(model).reading(layers)
    some = [(prompt, index) for prompt in PROMPTS for index in (1, len(prompt) - 1, 2)]
    for (tokens, index), states in zip(some, teacher_forced_states(target, some), strict=True):
        alone = target.hidden(mx.array([tokens]), [None] * target.n_layers)[0]
        assert states.shape == (len(tokens) - index, target.context_size)
        np.testing.assert_allclose(states, alone[index - 1 : -1], atol=5e-3)


def test_each_token_of_the_prompts_is_read_once() -> None:
    target = Target(random_model())
    answers = texts(target)
    second_turn = [*PROMPTS[0], *answers[0].answer.tolist(), 70, 71, 72, 73]
    later = replace(answers[0], prompt=second_turn)
    found = ReadTexts().of_block(target, byte_tokenizer(), 0, [*answers, later])
    assert [(t.prompt, t.answer.tolist()) for t in found] == [
        (HEAD[:1], PROMPTS[0][1:]),
        ([*HEAD, 5, 6], [30, 31, 32, 33]),
        ([*PROMPTS[0], *answers[0].answer.tolist()], [70, 71, 72, 73]),
    ]
    assert not any(text.hard_labels for text in found)


@pytest.mark.parametrize("layers", [(), (0, 1)])
def test_stored_prompt_states_equal_those_of_reading_the_prompts(layers: tuple[int, ...]) -> None:
    target = Target(random_model("qwen3")).reading(layers)
    written = write_answers(target, PROMPTS, [], 6, openings=(0, 5), key=mx.random.key(3))
    kept = [w.text(target) for w in written]
    assert all(text.prompt_states is not None for text in kept)
    read = [replace(text, prompt_states=None) for text in kept]
    got, want = (ReadTexts().of_block(target, byte_tokenizer(), 0, texts) for texts in (kept, read))
    assert len(want) > 2
    for one, other in zip(got, want, strict=True):
        assert (one.prompt, one.answer.tolist()) == (other.prompt, other.answer.tolist())
        np.testing.assert_allclose(one.states, other.states, atol=5e-3)
        if layers:
            assert one.layer_inputs is not None
            assert other.layer_inputs is not None
            np.testing.assert_allclose(one.layer_inputs, other.layer_inputs, atol=5e-3)


def test_prompts_with_stored_states_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, shard = Target(random_model()).reading((0,)), tmp_path / "block-000007.safetensors"
    answers = texts(target)
    extras = Extras(context=(0,), read=(ReadTexts(),))
    monkeypatch.setattr(target, "hidden", None)  # any further reading fails
    extras.add(target, byte_tokenizer(), shard, 7, answers)
    assert all(path.exists() for path in extras.files(shard))
    save_shard(Shard(answers, {}), shard, {})
    (read,) = extras.read_shards(shard)
    assert [text.answer.tolist() for text in extras.load(read)] == [
        PROMPTS[0][1:],
        [30, 31, 32, 33],
    ]


def test_prompts_are_stored_as_shards_with_soft_labels_only(tmp_path: Path) -> None:
    target, shard = Target(random_model()), tmp_path / "block-000007.safetensors"
    answers = texts(target)
    extras = Extras(context=(0,), read=(ReadTexts(),))
    save_shard(Shard(answers, {}), shard, {})
    extras.add(target, byte_tokenizer(), shard, 7)
    assert all(path.exists() for path in extras.files(shard))
    (read,) = extras.read_shards(shard)
    loaded = extras.load(shard) + extras.load(read)
    assert [text.hard_labels for text in loaded] == [True] * 5 + [False] * 2
    assert all(text.layer_inputs is not None for text in loaded)
    laid = lay_out(loaded, 2)
    assert laid.hard.tolist() == [True] * 30 + [False] * (7 + 4)
    assert laid.states.shape[1] == 2 * target.hidden_size


def test_prompts_that_are_not_new_are_not_trained_on(tmp_path: Path) -> None:
    target, shard = Target(random_model()), tmp_path / "block-000007.safetensors"
    save_shard(Shard(texts(target), {}), shard, {})
    extras = Extras(context=(0,), read=(ReadTexts(),))
    extras.add(target, byte_tokenizer(), shard, 7, new_prompts=False)
    (read,) = extras.read_shards(shard)
    assert extras.load(read) == []


def test_a_shard_holds_texts_of_one_kind(tmp_path: Path) -> None:
    answers = texts(Target(random_model()))
    mixed = [answers[0], replace(answers[1], hard_labels=False)]
    with pytest.raises(ValueError, match="one kind"):
        save_shard(Shard(mixed, {}), tmp_path / "block-000000.safetensors", {})


def test_texts_that_are_only_read_are_read_once_each_block_after_block(tmp_path: Path) -> None:
    target, tokenizer = Target(byte_model()), byte_tokenizer()
    some = [Conversation((f"Text {i}.",), (f"Answer {i}.",) if i % 2 else ()) for i in range(5)]
    files = ReadTexts(tuple(some), per_block=2)
    extras = Extras(read=(ReadTexts(), files))
    seen = ""
    for block in range(4):
        shard = tmp_path / f"block-{block:06d}.safetensors"
        save_shard(Shard([], {}), shard, {})
        extras.add(target, tokenizer, shard, block)
        read = load_shard(files.path(shard)).texts
        assert len(read) == (2, 2, 1, 0)[block]
        seen += "".join(tokenizer.decode(text.answer.tolist()) for text in read)
        assert not any(text.hard_labels for text in read)
    assert [seen.count(f"{i}.") for i in range(5)] == [1, 2, 1, 2, 1]


def test_the_length_of_texts_that_are_only_read_is_that_of_a_sample() -> None:
    target, tokenizer = Target(byte_model()), byte_tokenizer()
    texts = ReadTexts(tuple(Conversation((f"Text {i:04d}.",)) for i in range(100)))
    read = texts.of_block(target, tokenizer, 0, [])
    length = texts.mean_length(tokenizer)
    assert length == pytest.approx(max(len(t.prompt) + len(t.answer) for t in read))
    refuse_system_messages(tokenizer)
    assert ReadTexts((Conversation(("a",), system="b"),)).mean_length(tokenizer) == 0


def test_texts_that_the_template_refuses_are_not_read() -> None:
    tokenizer = byte_tokenizer()
    refuse_system_messages(tokenizer)
    given = (Conversation(("a text",), system="be kind"), Conversation(("another text",)))
    (read,) = ReadTexts(given).of_block(Target(byte_model()), tokenizer, 0, [])
    assert "another text" in tokenizer.decode(read.answer.tolist())


def test_other_texts_lie_in_another_folder() -> None:
    shard = Path("block-000000.safetensors")
    texts = [(Conversation(("a",)),), (Conversation(("b",)),), ()]
    assert len({ReadTexts(text).path(shard) for text in [*texts, None]}) == 4
    assert ReadTexts(texts[0], 6).path(shard) != ReadTexts(texts[0]).path(shard)
