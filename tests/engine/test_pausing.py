"""An answer whose caller does not read pauses; the others go on."""

from __future__ import annotations

import gc
import threading
import time
from types import SimpleNamespace

import mlx.core as mx
import pytest
from engines import ENDLESS, PROMPTS, Build, tokens_of
from waiting import DEADLINE, wait_for

from redrafter_mlx.response import Response


def test_a_caller_that_stops_reading_log_probabilities_holds_few_of_them(build: Build) -> None:
    """Each is as large as the vocabulary. Its answer pauses, others go on, and no token changes."""
    redrafter = build(None)
    want = tokens_of(redrafter, [1, 2, 3], max_tokens=400)
    read = redrafter.stream([1, 2, 3], max_tokens=400, logprobs=True, cache_prompt=False)
    first = next(read)
    mx.synchronize()
    for _ in range(2):
        tokens_of(redrafter, [4, 5], max_tokens=300)
    alive = [one for one in gc.get_objects() if isinstance(one, Response)]
    assert sum(one.logprobs is not None for one in alive) < 100
    assert redrafter.status.running == 1
    assert [first.token, *(response.token for response in read)] == want


def test_a_batch_that_is_not_read_holds_few_log_probabilities(build: Build) -> None:
    """Even while some of its answers wait for their places."""
    redrafter = build(None, max_batch=2)
    want = [tokens_of(redrafter, prompt, max_tokens=200) for prompt in PROMPTS]
    read = redrafter.batch(PROMPTS, max_tokens=200, logprobs=True)
    got = {next(read)[0]: 1}

    def held() -> int:
        return sum(isinstance(one, Response) for one in gc.get_objects())

    wait_for(lambda: held() > 60)
    time.sleep(0.5)
    assert held() < 100
    assert redrafter.status.waiting == 4
    for i, response in read:
        assert response.token == want[i][got.setdefault(i, 0)]
        got[i] += 1
    assert got == {i: len(tokens) for i, tokens in enumerate(want)}


def test_a_caller_that_stops_reading_may_cancel_its_paused_answer(build: Build) -> None:
    redrafter = build(None)
    read = redrafter.stream([1, 2, 3], max_tokens=ENDLESS, logprobs=True)
    next(read)
    tokens_of(redrafter, [4, 5], max_tokens=300)
    read.close()
    assert redrafter.status.running == 0


def test_who_waits_for_a_caller_lets_others_use_the_model(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    redrafter, held = build(None), list[bool]()

    def sleep(seconds: float) -> None:
        del seconds
        held.append(redrafter.target.lock.held_here)

    read = redrafter.stream([1, 2, 3], max_tokens=ENDLESS, logprobs=True)
    next(read)
    clock = SimpleNamespace(sleep=sleep)
    monkeypatch.setattr("redrafter_mlx.engine.scheduler.time", clock)
    wait_for(lambda: len(held) > 0)
    read.close()
    assert not any(held)


def test_a_paused_answer_goes_on_after_others_have_ended_by_themselves(build: Build) -> None:
    """At an end of text, when their next step was submitted already."""
    redrafter = build(None)
    want = tokens_of(redrafter, [1, 2, 3], max_tokens=200)
    read = redrafter.stream([1, 2, 3], max_tokens=200, logprobs=True)
    first = next(read)
    other = redrafter.generate([4, 5], max_tokens=5000, temperature=1.0, seed=1)
    assert other.finish_reason == "stop"
    assert len(other.token_ids) > 150
    assert [first.token, *(response.token for response in read)] == want


def test_one_caller_may_read_more_answers_in_turn_than_run_at_once(build: Build) -> None:
    """Those that it reads too slowly do not pause for ever in the places of the others."""
    redrafter = build(None, max_batch=2)
    want = [tokens_of(redrafter, prompt, max_tokens=150) for prompt in PROMPTS[:3]]
    reads = [redrafter.stream(p, max_tokens=150, logprobs=True) for p in PROMPTS[:3]]
    turns: list[tuple[Response, ...]] = []
    reader = threading.Thread(target=lambda: turns.extend(zip(*reads, strict=True)), daemon=True)
    reader.start()
    reader.join(DEADLINE)
    assert not reader.is_alive()
    assert [[response.token for response in read] for read in zip(*turns, strict=True)] == want
