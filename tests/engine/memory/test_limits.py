"""Where memory ends: what is refused, what waits, what ends."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from engines import ENDLESS, LONG, PROMPTS, limit_to, make, tokens_of
from waiting import wait_for

from redrafter_mlx.decoding.pipeline import Advanced, Pipeline
from redrafter_mlx.errors import BadInputError, BusyError
from redrafter_mlx.target_model.cache.slots import CAPACITY_STEP


def test_what_does_not_fit_is_refused_in_one_line_and_the_next_is_answered(
    model: nn.Module,
) -> None:
    """The first request, too: nothing was measured yet. Others' memory may be freed later."""
    want = tokens_of(make(model, None), [1, 2], max_tokens=3)
    redrafter = make(model, None, prefix_bytes=0)
    budget = limit_to(redrafter, 600)
    for weights, error in ((budget.weights, BadInputError), (0, BusyError)):
        budget.weights = weights
        with pytest.raises(error, match=r"500 tokens needs .* GB"):
            redrafter.generate(LONG + LONG[:100], max_tokens=3)
    assert tokens_of(redrafter, [1, 2], max_tokens=3) == want
    redrafter.close()


@pytest.mark.parametrize("most", [1, 2])
def test_a_request_that_can_never_fit_is_refused_at_once_and_delays_no_other(
    model: nn.Module, most: int
) -> None:
    """While another one runs, and even if no further one could begin now."""
    want = tokens_of(make(model, None), [1, 2], max_tokens=3)
    redrafter = make(model, None, prefix_bytes=0, max_batch=most)
    limit_to(redrafter, 40_000)
    running = redrafter.stream([1, 2, 3], max_tokens=ENDLESS)
    next(running)
    with pytest.raises(BadInputError, match="60000 tokens needs"):
        redrafter.generate(LONG * 150, max_tokens=3)
    assert redrafter.status.running == 1
    if most == 1:
        running.close()
    assert tokens_of(redrafter, [1, 2], max_tokens=3) == want
    running.close()
    redrafter.close()


def test_a_waiting_request_is_refused_when_the_bytes_of_a_slot_show_that_it_never_fits(
    model: nn.Module,
) -> None:
    redrafter = make(model, None, prefix_bytes=0, max_batch=1)
    running = redrafter.stream([1, 2, 3], max_tokens=ENDLESS)
    next(running)
    budget = limit_to(redrafter, 4000)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(redrafter.generate, LONG, max_tokens=3)
        wait_for(lambda: redrafter.status.waiting == 1)
        budget.slot = 1e6  # as if measured now
        running.close()
        with pytest.raises(BadInputError, match="400 tokens needs"):
            waiting.result(60)
    redrafter.close()


def test_an_answer_ends_where_memory_does_and_others_go_on(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No cache exceeds the limit by more than one step of growth."""
    want = tokens_of(make(model, None), [1, 2], max_tokens=900)
    redrafter = make(model, None, prefix_bytes=0)
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
    redrafter.close()


def test_where_memory_ends_a_paused_answer_is_not_ended_for_one_that_grows(
    model: nn.Module,
) -> None:
    """It takes no step to end with, so that the other would grow beyond all limits."""
    redrafter = make(model, None, prefix_bytes=0)
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
    redrafter.close()


def test_an_idle_engine_returns_unused_memory_once(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each busy period, however many answers it had."""
    cleared: list[int] = []
    redrafter = make(model, None)
    scheduler = redrafter.core.scheduler
    stand_in = SimpleNamespace(clear_cache=lambda: cleared.append(scheduler.running))
    monkeypatch.setattr("redrafter_mlx.engine.scheduler.mx", stand_in)
    running = redrafter.stream([1, 2, 3], max_tokens=ENDLESS)
    next(running)
    for prompt in PROMPTS:
        tokens_of(redrafter, prompt, max_tokens=3)
    assert cleared == []
    running.close()
    wait_for(lambda: cleared == [0])
    tokens_of(redrafter, [1, 2], max_tokens=3)
    redrafter.close()
    assert cleared == [0, 0]
