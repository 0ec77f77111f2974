"""Checkpoints of recurrent states: which tokens of a later prompt are read again."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import mlx.core as mx
import pytest
from decoding import up_to
from ended import ended
from hybrids import hybrid_model
from tiny import byte_tokenizer, plain_tokens, random_drafter

from redrafter_mlx.config import PLAIN, BeamShape, SamplingParams
from redrafter_mlx.decoding.cache.checkpoints import CHANGED_END, Checkpoint, merged, stops
from redrafter_mlx.decoding.cache.prefix_cache import PrefixCache
from redrafter_mlx.decoding.cache.sequence_cache import SequenceCache
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.options import EngineOptions
from redrafter_mlx.target_model.model import Target

SHAPES: list[dict[str, int]] = [{"beam_width": 1, "beam_length": 1},
                                {"beam_width": 3, "beam_length": 4}]  # fmt: skip


def engine(name: str = "qwen3_5", **options: object) -> Redrafter:
    model = hybrid_model(name, vocab_size=258, max_position_embeddings=4096, **options)
    return Redrafter(model, byte_tokenizer(), random_drafter(vocab_size=258))


def text(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(n)]


def answered(
    redrafter: Redrafter, prompt: list[int], n: int = 24, **options: int
) -> tuple[list[int], int]:
    """Return an answer, and how many tokens of its prompt were not read."""
    responses = [*redrafter.stream(prompt, max_tokens=n, **options)]
    tokens = [response.token for response in responses]
    end = redrafter.tokenizer.eos_token_id
    assert tokens == up_to(end, plain_tokens(redrafter.target.model, prompt, n))
    return tokens, responses[-1].cached_tokens


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1", "lfm2", "mamba2"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_second_turn_of_a_conversation_reads_only_the_new_tokens(
    name: str, shape: dict[str, int]
) -> None:
    """Wherever in a step the answer ends."""
    redrafter, prompt = engine(name), text(1000 if name == "mamba2" else 100)
    for n in (13, 14, 15):
        answer, _ = answered(redrafter, prompt, n, **shape)
        following = prompt + answer + text(30, seed=n)
        _, cached = answered(redrafter, following, 8, **shape)
        assert cached >= len(prompt) + len(answer) - 1


@pytest.mark.parametrize("shape", SHAPES)
def test_an_edited_message_is_read_from_the_last_checkpoint_before_it(
    shape: dict[str, int],
) -> None:
    redrafter, prompt = engine(), text(150)
    first, _ = answered(redrafter, prompt, **shape)
    second = prompt + first + text(90, seed=1)
    answered(redrafter, second, **shape)
    edited = prompt + first + text(90, seed=2)
    assert answered(redrafter, edited, **shape)[1] == len(prompt) + len(first) - 1
    ended = second[:-3] + text(3, seed=3)  # as by a template that renders the end anew
    assert answered(redrafter, ended, **shape)[1] == len(second) - CHANGED_END


def test_a_prefix_is_kept_where_two_prompts_were_seen_to_part() -> None:
    redrafter, shared = engine(), text(120)
    prompts = [shared + text(80, seed=i) for i in range(1, 4)]
    assert [answered(redrafter, prompt)[1] for prompt in prompts] == [0, 0, 120]


def test_a_cancelled_answer_and_prompt_are_kept_as_far_as_they_were_read() -> None:
    redrafter, prompt = engine(), text(100)
    responses = redrafter.stream(prompt, max_tokens=50, beam_width=2, beam_length=4)
    tokens = [next(responses).token for _ in range(7)]
    responses.close()
    _, cached = answered(redrafter, prompt + tokens + text(9, seed=5))
    assert len(prompt) <= cached <= len(prompt) + len(tokens)


def test_answers_of_a_batch_are_kept_each_at_its_own_end() -> None:
    redrafter = engine()
    prompts = [text(70 + 9 * i, seed=i) for i in range(4)]
    answers: list[list[int]] = [[] for _ in prompts]
    shape = {"beam_width": 2, "beam_length": 4}
    for i, response in redrafter.batch(prompts, max_tokens=13, **shape):
        answers[i].append(response.token)
    for prompt, answer in zip(prompts, answers, strict=True):
        following = prompt + answer + text(20, seed=9)
        assert answered(redrafter, following, 8)[1] >= len(prompt) + len(answer) - 1


def test_stops_are_where_a_checkpoint_saves_reading() -> None:
    assert stops(0, 5000, 0) == [2048, 4096, 5000 - CHANGED_END]
    assert stops(2048, 5000, 3000) == [3000, 4096, 5000 - CHANGED_END]
    assert stops(4990, 5000, 4995) == []


def test_of_many_checkpoints_those_are_kept_that_are_far_apart() -> None:
    kept = merged(Checkpoint(n, ()) for n in [*range(0, 4000, 100), 3990, 3995, 4000])
    assert len(kept) == 16
    assert kept[-1].position == 4000
    gaps = [b.position - a.position for a, b in itertools.pairwise(kept)]
    assert max(gaps) <= 500


def test_checkpoints_are_counted_and_dropped_with_their_texts() -> None:
    target = Target(hybrid_model("qwen3_5"))
    decoder = Decoder(target, None, PLAIN, SamplingParams())

    def read(tokens: list[int], at: int) -> SequenceCache:
        cache = decoder.new_cache()
        target.append(mx.array([tokens[:at]]), cache.target, 0)
        cache.keep_states(at)
        target.append(mx.array([tokens[at:]]), cache.target, at)
        return cache

    tokens = [7] * 20
    texts, states = PrefixCache(10**9), read(tokens, 9).target.state_bytes
    without = read(tokens, 20 - 1).trimmed_size(20)[0] - states
    texts.keep(read(tokens, 9), tokens, None)
    assert texts.nbytes == without + states
    for prompt, start in (([7] * 15 + [3], 9), ([7] * 9 + [3], 9), ([7] * 8 + [3], 0)):
        found = texts.take(prompt, None)
        assert (0 if found is None else found[1]) == start
    longer = [7] * 30
    texts.keep(read(longer, 25), longer, None)
    assert texts.nbytes >= without + 3 * states
    assert texts.take([7] * 15 + [3], None)[1] == 9  # type: ignore[index]
    texts.shrink(0)
    assert texts.nbytes == 0


@pytest.mark.parametrize("shape", [PLAIN, BeamShape(2, 3)])
def test_a_session_of_a_hybrid_reads_each_turn_once(shape: BeamShape) -> None:
    redrafter = engine()
    session = redrafter.session()
    for turn in range(3):
        responses = [
            *session.stream("question " * 12, max_tokens=10, beam_width=shape.width,
                            beam_length=shape.length)
        ]  # fmt: skip
        if turn:
            new = responses[-1].prompt_tokens - responses[-1].cached_tokens
            assert new <= 12 * len("question ") + 60


def test_checkpoints_are_there_after_a_restart(tmp_path: Path) -> None:
    model, prompt = hybrid_model("qwen3_5", vocab_size=258, max_position_embeddings=4096), text(300)

    def start() -> Redrafter:
        drafter, options = random_drafter(vocab_size=258), EngineOptions(cache_dir=tmp_path / "c")
        return Redrafter(model, byte_tokenizer(), drafter, engine=options)

    first = start()
    answer, _ = answered(first, prompt, 12, **SHAPES[1])
    ended(first)
    for following, cached in (
        (prompt + answer + text(9, seed=1), len(prompt) + len(answer) - 1),
        (prompt[:-4] + text(9, seed=2), len(prompt) - CHANGED_END),
    ):
        second = start()
        assert answered(second, following, 8, **SHAPES[1])[1] == cached
        ended(second)
