"""What was read of a prompt is kept for those that begin alike."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
from engines import ENDLESS, LONG, Build, Calls, limit_to, tokens_of
from waiting import wait_for

from redrafter_mlx.config import GenerationOptions
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.request import Request


def test_a_second_turn_reads_its_new_tokens_only(redrafter: Redrafter) -> None:
    calls = Calls(redrafter)
    first = redrafter.generate(LONG[:300], max_tokens=20)
    again = [*first.prompt_ids, *first.token_ids, 1, 2, 3]
    responses = list(redrafter.stream(again, max_tokens=5))
    # The last emitted token is not in the cache yet.
    assert responses[0].cached_tokens == len(again) - 4
    assert calls.of("chunk")[-1] == 4
    assert [r.token for r in responses] == tokens_of(
        redrafter, again, max_tokens=5, cache_prompt=False
    )


def test_prompts_that_begin_alike_share_what_was_read(redrafter: Redrafter) -> None:
    """Also across requests, and all at once; without cache_prompt nothing is shared or kept."""
    system = LONG[:100]
    assert next(redrafter.stream([*system, 1], max_tokens=1, cache_prompt=False)).cached_tokens == 0
    assert next(redrafter.stream([*system, 1], max_tokens=1)).cached_tokens == 0
    prompts = [[*system, 2, n] for n in range(4)]
    want = [tokens_of(redrafter, p, max_tokens=15, cache_prompt=False) for p in prompts]
    got: list[list[int]] = [[] for _ in prompts]
    for i, response in redrafter.batch(prompts, max_tokens=15):
        assert response.cached_tokens >= 100
        got[i].append(response.token)
    assert got == want


def test_the_prefix_that_a_request_needs_is_dropped_after_all_others(build: Build) -> None:
    redrafter = build(None)
    wanted, other = LONG[:200], [9, *LONG[:200]]
    for prompt in (wanted, other):
        redrafter.generate(prompt, max_tokens=3)
    scheduler = redrafter.core.scheduler
    prefixes, budget = scheduler.prefixes.cache, scheduler.memory
    gc.collect()
    needed = budget.needed(budget.slots(Request((*wanted, 7), GenerationOptions(max_tokens=1))))
    budget.limit = mx.get_active_memory() + needed - prefixes.nbytes // 4
    (response,) = redrafter.stream([*wanted, 7], max_tokens=1)
    assert response.cached_tokens == 200
    assert next(redrafter.stream([*other, 7], max_tokens=1)).cached_tokens == 0


def test_no_prefix_is_dropped_for_an_answer_that_must_wait_all_the_same(build: Build) -> None:
    redrafter = build(None)
    redrafter.generate(LONG[:200], max_tokens=3)
    running = redrafter.stream([9, 9], max_tokens=ENDLESS, cache_prompt=False)
    next(running)
    limit_to(redrafter, 900)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: list(redrafter.stream(LONG[:201], max_tokens=3)))
        wait_for(lambda: redrafter.status.waiting == 1)
        rounds = redrafter.status.last_progress
        wait_for(lambda: redrafter.status.last_progress > rounds)
        running.close()
        assert waiting.result(60)[0].cached_tokens == 200


def test_a_prompt_is_kept_together_with_its_length(build: Build) -> None:
    """So that a later turn, whose prompt has another form of the answer, replaces it."""
    redrafter = build(None)
    redrafter.generate(LONG[:50], max_tokens=20)
    (entry,) = redrafter.core.scheduler.prefixes.cache.entries
    assert (entry.prompt, len(entry.tokens)) == (50, 69)


def test_kept_texts_give_way_to_answers(build: Build) -> None:
    redrafter = build(None)
    for n in range(4):
        redrafter.generate([n, *LONG[:200]], max_tokens=3)
    scheduler = redrafter.core.scheduler
    kept = scheduler.prefixes.cache.nbytes
    scheduler.memory.limit = mx.get_active_memory() + scheduler.memory.work
    redrafter.generate([9, 9], max_tokens=3, cache_prompt=False)
    assert scheduler.prefixes.cache.nbytes < kept
