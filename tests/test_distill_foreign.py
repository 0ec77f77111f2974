"""Prompts as text to learn from: read once, with what the target expects at each token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from tiny import byte_model, byte_tokenizer, random_model

from redrafter_mlx.distill.corpus.conversations import Conversation
from redrafter_mlx.distill.corpus.examples import places
from redrafter_mlx.distill.corpus.extras import Extras
from redrafter_mlx.distill.corpus.generation import write_answers
from redrafter_mlx.distill.corpus.shards import Shard, Text, load_shard, save_shard
from redrafter_mlx.distill.corpus.soft_labels import Foreign
from redrafter_mlx.distill.corpus.teacher_forcing import states_along
from redrafter_mlx.target.model import Target

HEAD = [90, 91, 92]
PROMPTS = [
    [*HEAD, 5, 6, 7, 8, 9],
    [*HEAD, 5, 6, 7, 8, 9],  # the same again, for another answer
    [*HEAD, 5, 6, 30, 31, 32, 33],
    [*HEAD, 5, 6],  # all of it known
    [*HEAD, 40, 41],  # too little that is new
]


def texts(target: Target) -> list[Text]:
    return [w.text(target) for w in write_answers(target, PROMPTS, [], 6)]


@pytest.mark.parametrize("layers", [(), (0, 1)])
def test_states_along_texts_are_those_of_each_text_alone(layers: tuple[int, ...]) -> None:
    target = Target(random_model("qwen3")).reading(layers)
    some = [(prompt, place) for prompt in PROMPTS for place in (1, len(prompt) - 1, 2)]
    for (tokens, place), states in zip(some, states_along(target, some), strict=True):
        alone = target.hidden(mx.array([tokens]), [None] * target.n_layers)[0]
        assert states.shape == (len(tokens) - place, target.context_size)
        np.testing.assert_allclose(states, alone[place - 1 : -1], atol=5e-3)


def test_each_token_of_the_prompts_is_read_once() -> None:
    target = Target(random_model())
    said = texts(target)
    second_turn = [*PROMPTS[0], *said[0].answer.tolist(), 70, 71, 72, 73]
    later = replace(said[0], prompt=second_turn)
    found = Foreign().read(target, byte_tokenizer(), 0, [*said, later])
    assert [(t.prompt, t.answer.tolist()) for t in found] == [
        (HEAD[:1], PROMPTS[0][1:]),
        ([*HEAD, 5, 6], [30, 31, 32, 33]),
        ([*PROMPTS[0], *said[0].answer.tolist()], [70, 71, 72, 73]),
    ]
    assert not any(text.own for text in found)


@pytest.mark.parametrize("layers", [(), (0, 1)])
def test_what_was_kept_of_prompts_is_what_reading_them_gives(layers: tuple[int, ...]) -> None:
    target = Target(random_model("qwen3")).reading(layers)
    written = write_answers(target, PROMPTS, [], 6, openings=(0, 5), key=mx.random.key(3))
    kept = [w.text(target) for w in written]
    assert all(text.before is not None for text in kept)
    read = [replace(text, before=None) for text in kept]
    got, want = (Foreign().read(target, byte_tokenizer(), 0, texts) for texts in (kept, read))
    assert len(want) > 2
    for one, other in zip(got, want, strict=True):
        assert (one.prompt, one.answer.tolist()) == (other.prompt, other.answer.tolist())
        np.testing.assert_allclose(one.states, other.states, atol=5e-3)
        if layers:
            assert one.contexts is not None
            assert other.contexts is not None
            np.testing.assert_allclose(one.contexts, other.contexts, atol=5e-3)


def test_prompts_that_were_kept_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, shard = Target(random_model()).reading((0,)), tmp_path / "block-000007.safetensors"
    said = texts(target)
    extras = Extras(context=(0,), foreign=(Foreign(),))
    monkeypatch.setattr(target, "_read", None)  # whatever is read now fails
    extras.keep(target, byte_tokenizer(), said, shard, 7)
    assert all(path.exists() for path in extras.files(shard))
    save_shard(Shard(said, {}), shard, {})
    (read,) = extras.foreign_shards(shard)
    assert [text.answer.tolist() for text in extras.load(read)] == [
        PROMPTS[0][1:],
        [30, 31, 32, 33],
    ]


def test_prompts_are_kept_as_shards_whose_texts_are_no_labels(tmp_path: Path) -> None:
    target, shard = Target(random_model()), tmp_path / "block-000007.safetensors"
    said = texts(target)
    extras = Extras(context=(0,), foreign=(Foreign(),))
    save_shard(Shard(said, {}), shard, {})
    extras.add(target, byte_tokenizer(), shard, 7)
    assert all(path.exists() for path in extras.files(shard))
    (read,) = extras.foreign_shards(shard)
    loaded = extras.load(shard) + extras.load(read)
    assert [text.own for text in loaded] == [True] * 5 + [False] * 2
    assert all(text.contexts is not None for text in loaded)
    laid = places(loaded, 2)
    assert laid.own.tolist() == [True] * 30 + [False] * (7 + 4)
    assert laid.states.shape[1] == 2 * target.hidden_size


def test_prompts_that_are_not_new_are_not_learnt(tmp_path: Path) -> None:
    target, shard = Target(random_model()), tmp_path / "block-000007.safetensors"
    save_shard(Shard(texts(target), {}), shard, {})
    extras = Extras(context=(0,), foreign=(Foreign(),))
    extras.add(target, byte_tokenizer(), shard, 7, new_prompts=False)
    (read,) = extras.foreign_shards(shard)
    assert extras.load(read) == []


def test_a_shard_holds_texts_of_one_kind(tmp_path: Path) -> None:
    said = texts(Target(random_model()))
    mixed = [said[0], replace(said[1], own=False)]
    with pytest.raises(ValueError, match="one kind"):
        save_shard(Shard(mixed, {}), tmp_path / "block-000000.safetensors", {})


def test_texts_that_are_only_read_are_read_once_each_block_after_block(tmp_path: Path) -> None:
    target, tokenizer = Target(byte_model()), byte_tokenizer()
    some = [Conversation((f"Text {i}.",), (f"Answer {i}.",) if i % 2 else ()) for i in range(5)]
    foreign = Foreign(tuple(some), with_each=2)
    extras = Extras(foreign=(Foreign(), foreign))
    seen = ""
    for block in range(4):
        shard = tmp_path / f"block-{block:06d}.safetensors"
        save_shard(Shard([], {}), shard, {})
        extras.add(target, tokenizer, shard, block)
        read = load_shard(foreign.path(shard)).texts
        assert len(read) == (2, 2, 1, 0)[block]
        seen += "".join(tokenizer.decode(text.answer.tolist()) for text in read)
        assert not any(text.own for text in read)
    assert [seen.count(f"{i}.") for i in range(5)] == [1, 2, 1, 2, 1]


def test_other_texts_lie_in_another_folder() -> None:
    shard = Path("block-000000.safetensors")
    texts = [(Conversation(("a",)),), (Conversation(("b",)),), ()]
    assert len({Foreign(text).path(shard) for text in [*texts, None]}) == 4
