"""What answers need of memory; where it ends: what is refused, what waits, what ends."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from engines import LONG, PROMPTS, Build, begin, failing, limit_to, tokens_of
from tiny import byte_tokenizer
from waiting import wait_for

from redrafter_mlx.config import GenerationOptions
from redrafter_mlx.decoding.pipeline import Advanced, Pipeline
from redrafter_mlx.drafting.draft_model import DraftModel
from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.request import Request
from redrafter_mlx.errors import BadInputError, BusyError, EngineFailedError
from redrafter_mlx.target_model.cache.slots import CAPACITY_STEP


def test_memory_is_reserved_for_a_drafters_cache_whatever_answered_last(
    model: nn.Module, build: Build
) -> None:
    """A draft model of the target's size doubles the bytes of a position."""
    redrafter = build(DraftModel(model, byte_tokenizer()))
    budget = redrafter.core.scheduler.memory
    of_target = budget.needed(1000)
    redrafter.generate([1, 2, 3], max_tokens=3)
    drafted = budget.needed(1000)
    assert drafted > 1.5 * of_target
    redrafter.generate([1, 2, 3], max_tokens=3, draft=False)
    assert budget.needed(1000) == drafted


def test_memory_is_reserved_for_the_index_of_a_text(build: Build) -> None:
    """Of those that run, too: the host keeps it, where MLX does not count."""
    plain, indexing = (build(each).core.scheduler.memory for each in (None, "lookup"))
    assert indexing.needed(1000) - plain.needed(1000) == 1000 * Lookup.bytes_per_token
    both = indexing.needed(1000, [500]) - plain.needed(1000, [500])
    assert both == 1500 * Lookup.bytes_per_token


def test_the_bytes_of_a_token_are_known_before_the_first_answer(build: Build) -> None:
    redrafter = build(None)
    budget = redrafter.core.scheduler.memory
    known = budget.slot
    tokens_of(redrafter, LONG, max_tokens=3)
    assert budget.slot == known > 0


def test_a_long_prompt_waits_until_all_rows_have_room_for_its_length(build: Build) -> None:
    """A batch's rows are as long as the longest, and it is copied when one joins."""
    redrafter = build(None, prefix_bytes=0)
    redrafter.generate([1, 2], max_tokens=3)
    budget = redrafter.core.scheduler.memory
    short, long = (Request(tuple(p), GenerationOptions(max_tokens=3)) for p in ([1, 2], LONG))
    S, T = (budget.slots(request) for request in (short, long))

    def bytes_of(slots: int, rows: int) -> int:
        return rows * budget.work + int(slots * budget.slot)

    assert budget.needed(T) == bytes_of(T, 1)
    assert budget.needed(T, [S] * 7, 0) == bytes_of(T + 8 * T, 8)
    assert budget.needed(S, [T], 0) == bytes_of(S + 2 * T, 2)
    assert budget.needed(S, [T], 1) == bytes_of(S + 2 * T + T, 2), "its prompt is being read"
    assert budget.slots(short, len(LONG) + 3) == T, "it has grown"


def test_a_failed_engine_still_knows_the_bytes_of_a_token(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    redrafter = build()
    redrafter.generate([1, 2], max_tokens=3)
    redrafter.core.scheduler.memory.slot = 9.0  # as if measured
    with monkeypatch.context() as patched:
        patched.setattr(redrafter.target, "append", failing(1, redrafter.target.append))
        with pytest.raises(EngineFailedError):
            redrafter.generate([1, 2], max_tokens=3)
    assert redrafter.core.scheduler.memory.slot == 9.0


def test_what_does_not_fit_is_refused_in_one_line_and_the_next_is_answered(build: Build) -> None:
    """The first request, too: nothing was measured yet. Others' memory may be freed later."""
    want = tokens_of(build(None), [1, 2], max_tokens=3)
    redrafter = build(None, prefix_bytes=0)
    budget = limit_to(redrafter, 600)
    for weights, error in ((budget.weights, BadInputError), (0, BusyError)):
        budget.weights = weights
        with pytest.raises(error, match=r"500 tokens needs .* GB"):
            redrafter.generate(LONG + LONG[:100], max_tokens=3)
    assert tokens_of(redrafter, [1, 2], max_tokens=3) == want


@pytest.mark.parametrize("most", [1, 2])
def test_a_request_that_can_never_fit_is_refused_at_once_and_delays_no_other(
    build: Build, most: int
) -> None:
    """While another one runs, and even if no further one could begin now."""
    want = tokens_of(build(None), [1, 2], max_tokens=3)
    redrafter = build(None, prefix_bytes=0, max_batch=most)
    limit_to(redrafter, 40_000)
    running = begin(redrafter)
    with pytest.raises(BadInputError, match="60000 tokens needs"):
        redrafter.generate(LONG * 150, max_tokens=3)
    assert redrafter.status.running == 1
    if most == 1:
        running.close()
    assert tokens_of(redrafter, [1, 2], max_tokens=3) == want


def test_a_waiting_request_is_refused_when_the_bytes_of_a_slot_show_that_it_never_fits(
    build: Build,
) -> None:
    redrafter = build(None, prefix_bytes=0, max_batch=1)
    running = begin(redrafter)
    budget = limit_to(redrafter, 4000)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(redrafter.generate, LONG, max_tokens=3)
        wait_for(lambda: redrafter.status.waiting == 1)
        budget.slot = 1e6  # as if measured now
        running.close()
        with pytest.raises(BadInputError, match="400 tokens needs"):
            waiting.result(60)


def test_an_answer_ends_where_memory_does_and_others_go_on(
    build: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No cache exceeds the limit by more than one step of growth."""
    want = tokens_of(build(None), [1, 2], max_tokens=900)
    redrafter = build(None, prefix_bytes=0)
    held: list[int] = []
    advance = Pipeline.advance

    def measured(batch: Pipeline) -> Advanced:
        advanced = advance(batch)
        held.append(batch.slots)
        return advanced

    monkeypatch.setattr(Pipeline, "advance", measured)
    limit_to(redrafter, 4000)
    endless = redrafter.stream([3, 4, 5], max_tokens=5000)
    first = [next(endless) for _ in range(20)]
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(tokens_of, redrafter, [1, 2], max_tokens=900)
        last = [*first, *endless][-1]
        assert other.result(60) == want
    assert last.finish_reason == "length"
    most = 4000 + 2 * CAPACITY_STEP
    assert 900 < last.generation_tokens < most
    assert 1024 < max(held) <= most
    assert "memory ran out" in caplog.text
    assert len(tokens_of(redrafter, [1, 2], max_tokens=3)) == 3


def test_where_memory_ends_a_paused_answer_is_not_ended_for_one_that_grows(build: Build) -> None:
    """It takes no step to end with, so that the other would grow beyond all limits."""
    redrafter = build(None, prefix_bytes=0)
    paused = redrafter.stream([3, 4, 5], max_tokens=1000, logprobs=True)
    growing = redrafter.stream([1, 2], max_tokens=20_000)
    for _ in range(800):
        next(paused)
    next(growing)
    mx.synchronize()
    limit_to(redrafter, CAPACITY_STEP)
    assert len([*growing]) < 20_000
    limit_to(redrafter, 4000)
    assert len([*paused]) == 200


def test_an_idle_engine_returns_unused_memory_once(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each busy period, however many answers it had."""
    cleared: list[int] = []
    redrafter = build(None)
    scheduler = redrafter.core.scheduler
    stand_in = SimpleNamespace(clear_cache=lambda: cleared.append(scheduler.running))
    monkeypatch.setattr("redrafter_mlx.engine.scheduler.mx", stand_in)
    running = begin(redrafter)
    for prompt in PROMPTS:
        tokens_of(redrafter, prompt, max_tokens=3)
    assert cleared == []
    running.close()
    wait_for(lambda: cleared == [0])
    tokens_of(redrafter, [1, 2], max_tokens=3)
    redrafter.close()
    assert cleared == [0, 0]
