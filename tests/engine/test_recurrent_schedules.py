"""Random schedules of requests to an engine whose target keeps a recurrent state."""

from __future__ import annotations

import random
from collections.abc import Generator
from functools import lru_cache
from typing import NamedTuple

import pytest
from decoding import up_to
from hybrids import hybrid_model
from tiny import byte_tokenizer, plain_tokens, random_drafter

from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.response import Response

SHAPES = ((1, 1), (1, 4), (2, 3), (3, 4))


class Running(NamedTuple):
    """An answer that is being read: its responses, its tokens so far, and those of mlx-lm."""

    responses: Generator[Response, None, None]
    tokens: list[int]
    want: list[int]


@lru_cache(maxsize=1)
def engine(name: str) -> Redrafter:
    model = hybrid_model(name, vocab_size=258, max_position_embeddings=4096)
    return Redrafter(model, byte_tokenizer(), random_drafter(vocab_size=258))


def follow_a_random_schedule(redrafter: Redrafter, seed: int) -> int:
    """Open, read, and cancel answers to new, longer and edited texts, and turns of a session.

    Every token is compared with mlx-lm's. Returns the number of prompt tokens that were cached.
    """
    rng, model = random.Random(seed), redrafter.target.model
    end, session = redrafter.tokenizer.eos_token_id, redrafter.session()
    texts, running = [[rng.randrange(256) for _ in range(rng.randrange(1, 40))]], list[Running]()
    in_session: Running | None = None
    cached, left = 0, 8

    width, length = rng.choice(SHAPES)  # the same for all answers, which form batches
    shape = {"beam_width": width, "beam_length": length}

    while left or running:
        if left and (not running or rng.random() < 0.15):
            left -= 1
            n = rng.randrange(1, 20)
            if in_session is None and rng.random() < 0.3:
                turn = {"role": "user", "content": "".join(rng.choices("ab ?", k=9)) + "."}
                prompt = redrafter.encode([*session.messages, turn])
                responses = session.stream(turn["content"], max_tokens=n, **shape)
                running.append(Running(responses, [], up_to(end, plain_tokens(model, prompt, n))))
                in_session = running[-1]
            else:
                text = rng.choice(texts)
                kept = text[: rng.randrange(1, len(text) + 1)] if rng.random() < 0.3 else text
                prompt = kept + [rng.randrange(256) for _ in range(rng.randrange(1, 9))]
                want = up_to(end, plain_tokens(model, prompt, n))
                responses = redrafter.stream(prompt, max_tokens=n, **shape)
                running.append(Running(responses, [], want))
                texts.append(prompt + want[: rng.randrange(len(want) + 1)])
        chosen = rng.choice(running)
        response = None if rng.random() < 0.04 else next(chosen.responses, None)
        if response is not None:
            chosen.tokens.append(response.token)
            cached += response.cached_tokens if len(chosen.tokens) == 1 else 0
            assert chosen.tokens == chosen.want[: len(chosen.tokens)]
            continue
        chosen.responses.close()
        running.remove(chosen)
        in_session = None if chosen is in_session else in_session
    return cached


def test_a_random_schedule_gives_every_answer_its_own_tokens() -> None:
    """Some prompt tokens are cached, so states of earlier texts were used."""
    assert follow_a_random_schedule(engine("qwen3_5"), seed=1) > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1", "kimi_linear", "lfm2"])
def test_a_thousand_random_schedules_give_every_answer_its_own_tokens(name: str) -> None:
    for seed in range(250):
        follow_a_random_schedule(engine(name), seed)
