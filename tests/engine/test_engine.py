"""The engine: many answers on one thread, each as if it were alone, unaffected by the others."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import statistics
import subprocess
import sys
import threading
import time
import weakref
from collections import abc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NoReturn

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from tiny import byte_model, byte_tokenizer, random_drafter
from waiting import DEADLINE, wait_for

from redrafter_mlx.config import BeamShape, GenerationOptions
from redrafter_mlx.cpu.threads import THREADS
from redrafter_mlx.decoding import order
from redrafter_mlx.decoding.cache.prefix_cache import PrefixCache
from redrafter_mlx.decoding.pipeline import Advanced, Pipeline
from redrafter_mlx.decoding.prefill import Prefill
from redrafter_mlx.decoding.proposal import Proposal
from redrafter_mlx.decoding.report import Report
from redrafter_mlx.decoding.sequence import Sequence
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.draft_model import DraftModel
from redrafter_mlx.drafting.oracle import Oracle
from redrafter_mlx.drafting.untrained.ngram import Lookup, NgramIndex
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.memory.budget import MemoryBudget
from redrafter_mlx.engine.options import EngineOptions
from redrafter_mlx.engine.request import Answer, Request
from redrafter_mlx.errors import BadInputError, BusyError, EngineFailedError
from redrafter_mlx.response import Response, StepResult
from redrafter_mlx.speculation.static_tree import StaticTree
from redrafter_mlx.target_model.cache.slots import CAPACITY_STEP
from redrafter_mlx.tuning.policy import TunedPolicy
from redrafter_mlx.tuning.tuner import Tuner
from redrafter_mlx.verification import verify

PROMPTS = [[i, i + 1, i + 2] for i in range(6)]
LONG = [(7 * i + 3) % 256 for i in range(400)]


ENDLESS = 10**5
"""Tokens of an answer that still runs when the test ends it."""


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return byte_model(seed=1, max_position_embeddings=10 * ENDLESS)


def make(model: nn.Module, drafter: object = "own", **limits: object) -> Redrafter:
    host: tuple[Lookup, ...] = ()
    if drafter in ("own", "lookup"):
        host = (Lookup(3 if drafter == "own" else 2),)
        drafter = random_drafter(vocab_size=258) if drafter == "own" else None
    return Redrafter(
        model, byte_tokenizer(), drafter, host_drafters=host,  # type: ignore[arg-type]
        engine=EngineOptions(**limits),  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.fixture
def redrafter(model: nn.Module) -> Iterator[Redrafter]:
    made = make(model)
    yield made
    made.close()


def test_an_answer_cancelled_between_two_looks_at_it_ends(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller would wait for ever. Here the answer that waits is cancelled after each look."""
    honest = Answer.over.fget
    assert honest is not None

    def looked_at(answer: Answer) -> bool:
        over = honest(answer)
        if answer.request.prompt == (7, 8, 9):
            answer.cancel()
        return over

    redrafter = make(model, None, max_batch=1)
    running = redrafter.stream([1, 2, 3], max_tokens=ENDLESS)
    next(running)
    monkeypatch.setattr(Answer, "over", property(looked_at))
    waiting = threading.Thread(target=lambda: list(redrafter.stream([7, 8, 9])), daemon=True)
    waiting.start()
    waiting.join(DEADLINE)
    assert not waiting.is_alive()
    running.close()
    redrafter.close()


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """While answers run, prompts are read in the smallest chunks."""
    monkeypatch.setattr("redrafter_mlx.engine.prompts.prompt_reader.PREFILL_SECONDS", 1e-6)
    monkeypatch.setattr("redrafter_mlx.engine.prompts.prompt_reader.MIN_TOKENS", 32)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time by which chunks are planned: one number, which stands still by itself."""
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("redrafter_mlx.engine.prompts.prompt_reader.time", clock)
    return now


@pytest.mark.parametrize("where", ["cpu", "apple"])
def test_the_steps_between_chunks_do_not_make_them_smaller(
    monkeypatch: pytest.MonkeyPatch, now: list[float], where: str
) -> None:
    """Running answers wait for a chunk; their own step takes its time anyway.

    A CPU computes a chunk while it is submitted, a GPU after the step that was submitted before.
    """
    at_once = where == "cpu"
    monkeypatch.setattr("redrafter_mlx.engine.prompts.prompt_reader.backend", lambda: where)
    monkeypatch.setattr(order, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    redrafter = Redrafter(byte_model(), byte_tokenizer())
    running = redrafter.stream([1, 2, 3], max_tokens=ENDLESS)
    next(running)
    append, wait, read_report = redrafter.target.append, Prefill.wait, Report.read

    def slow(report: Report) -> list[StepResult]:
        now[0] += 0.1
        return read_report(report)

    def appended(tokens: mx.array, *rest: object) -> mx.array:
        now[0] += 0.02 if at_once else 0.0
        return append(tokens, *rest)  # type: ignore[arg-type]

    def waited(prefill: Prefill) -> None:
        now[0] += 0.0 if at_once else 0.02
        wait(prefill)

    monkeypatch.setattr(Report, "read", slow)
    monkeypatch.setattr(Prefill, "wait", waited)
    monkeypatch.setattr(redrafter.target, "append", appended)
    read: list[int] = []
    prompt = [n % 90 for n in range(400)]
    next(redrafter.stream(prompt, max_tokens=1, on_prefill=lambda done, _: read.append(done)))
    chunks = [after - before for before, after in pairwise([0, *read])]
    assert chunks[0] == 32, "until the speed is known"
    assert chunks[1] > 80, "more than if the first 32 had taken 0.1 s"
    running.close()
    redrafter.close()


class Calls:
    """The calls of a target, in order: ("chunk", tokens) or ("step", batch rows)."""

    def __init__(self, redrafter: Redrafter) -> None:
        self.made: list[tuple[str, int]] = []
        target = redrafter.target
        append, verify = target.append, target.verify

        def counted_append(tokens: mx.array, *rest: object) -> mx.array:
            self.made.append(("chunk", tokens.shape[1]))
            return append(tokens, *rest)  # type: ignore[arg-type]

        def counted_verify(tree: object, cache: object, length: mx.array, *rest: object,
                           **named: object) -> object:  # fmt: skip
            self.made.append(("step", length.size))
            return verify(tree, cache, length, *rest, **named)  # type: ignore[arg-type]

        target.append = counted_append  # type: ignore[method-assign]
        target.verify = counted_verify  # type: ignore[assignment, method-assign]

    def of(self, kind: str) -> list[int]:
        return [size for which, size in self.made if which == kind]


def tokens_of(redrafter: Redrafter, prompt: abc.Sequence[int], **options: object) -> list[int]:
    return redrafter.generate(list(prompt), **options).token_ids  # type: ignore[arg-type]


def test_answers_of_many_threads_share_their_steps(redrafter: Redrafter) -> None:
    want = [tokens_of(redrafter, p, max_tokens=40) for p in PROMPTS]
    calls = Calls(redrafter)
    with ThreadPoolExecutor(6) as pool:
        got = list(pool.map(lambda p: tokens_of(redrafter, p, max_tokens=40), PROMPTS))
    assert got == want
    assert max(calls.of("step")) > 1


EACH_ITS_OWN: list[dict[str, object]] = [
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.2, "top_k": 20, "seed": 3, "logprobs": True},
    {"repetition_penalty": 1.3, "max_tokens": 7},
    {"draft": False, "temperature": 0.8, "seed": 9},
    {"beam_width": 3, "beam_length": 4, "temperature": 1.0, "accept": "rejection", "seed": 5},
    {"beam_width": 2, "beam_length": 3},
    {"temperature": 0.9, "accept": "typical", "beam_width": 2, "beam_length": 3, "seed": 8},
]


def test_a_request_gets_the_same_text_alone_and_among_others(redrafter: Redrafter) -> None:
    """Seeds, filters, penalties, shapes and acceptance methods, all at once."""
    each = [{"max_tokens": 30, **options} for options in EACH_ITS_OWN]
    want = [tokens_of(redrafter, [5, 6, 7], **options) for options in each]
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(tokens_of, redrafter, [5, 6, 7], **options) for options in each]
        assert [future.result() for future in futures] == want


def test_stop_strings_and_ends_cut_each_row_of_a_batch_where_they_would_alone(
    model: nn.Module, redrafter: Redrafter
) -> None:
    text = make(model, None).generate([72, 101], max_tokens=40).text
    each = [{"stop": text[i : i + 2], "max_tokens": 40} for i in (3, 9, 17)]
    each += [{"max_tokens": n} for n in (1, 2, 5)]
    want = [redrafter.generate([72, 101], **options) for options in each]  # type: ignore[arg-type]
    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(redrafter.generate, [72, 101], **options) for options in each]
        for future, alone in zip(futures, want, strict=True):
            got = future.result()
            assert (got.text, got.token_ids) == (alone.text, alone.token_ids)
            assert got.finish_reason == alone.finish_reason


def test_batch_answers_many_prompts_at_once(redrafter: Redrafter) -> None:
    want = [tokens_of(redrafter, p, max_tokens=20) for p in PROMPTS]
    got: list[list[int]] = [[] for _ in PROMPTS]
    for i, response in redrafter.batch(PROMPTS, max_tokens=20):
        got[i].append(response.token)
    assert got == want
    with pytest.raises(BadInputError, match="prompt"):
        redrafter.batch([[1], []])
    assert list(redrafter.batch([])) == []


def test_requests_that_come_together_begin_with_the_shape_of_their_batch(
    redrafter: Redrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    choose = TunedPolicy.propose

    def counted(policy: TunedPolicy, rows: abc.Sequence[Sequence]) -> Proposal:
        sizes.append(len(rows))
        return choose(policy, rows)

    monkeypatch.setattr(TunedPolicy, "propose", counted)
    for _ in redrafter.batch(PROMPTS[:3], max_tokens=1):
        pass
    assert sizes[0] == 3


def test_without_drafts_the_drafter_is_never_called(model: nn.Module) -> None:
    drafter = random_drafter(vocab_size=258)
    redrafter = make(model, drafter)
    assert redrafter.drafter is not None

    def called(*_: object) -> None:
        raise AssertionError("the drafter was called")

    for name in ("draft", "extend", "draw"):
        setattr(redrafter.drafter, name, called)
    assert len(list(redrafter.batch(PROMPTS, max_tokens=8, draft=False))) == 48
    redrafter.close()


def test_a_caller_that_stops_reading_log_probabilities_holds_few_of_them(model: nn.Module) -> None:
    """Each is as large as the vocabulary. Its answer pauses, others go on, and no token changes."""
    redrafter = make(model, None)
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
    redrafter.close()


def test_a_batch_that_is_not_read_holds_few_log_probabilities(model: nn.Module) -> None:
    """Even while some of its answers wait for their places."""
    redrafter = make(model, None, max_batch=2)
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
    redrafter.close()


def test_a_caller_that_stops_reading_may_cancel_its_paused_answer(model: nn.Module) -> None:
    redrafter = make(model, None)
    read = redrafter.stream([1, 2, 3], max_tokens=ENDLESS, logprobs=True)
    next(read)
    tokens_of(redrafter, [4, 5], max_tokens=300)
    read.close()
    assert redrafter.status.running == 0
    redrafter.close()


def test_who_waits_for_a_caller_lets_others_use_the_model(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    redrafter, held = make(model, None), list[bool]()

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
    redrafter.close()


def test_a_paused_answer_goes_on_after_others_have_ended_by_themselves(model: nn.Module) -> None:
    """At an end of text, when their next step was submitted already."""
    redrafter = make(model, None)
    want = tokens_of(redrafter, [1, 2, 3], max_tokens=200)
    read = redrafter.stream([1, 2, 3], max_tokens=200, logprobs=True)
    first = next(read)
    other = redrafter.generate([4, 5], max_tokens=5000, temperature=1.0, seed=1)
    assert other.finish_reason == "stop"
    assert len(other.token_ids) > 150
    assert [first.token, *(response.token for response in read)] == want
    redrafter.close()


def test_one_caller_may_read_more_answers_in_turn_than_run_at_once(model: nn.Module) -> None:
    """Those that it reads too slowly do not pause for ever in the places of the others."""
    redrafter = make(model, None, max_batch=2)
    want = [tokens_of(redrafter, prompt, max_tokens=150) for prompt in PROMPTS[:3]]
    reads = [redrafter.stream(p, max_tokens=150, logprobs=True) for p in PROMPTS[:3]]
    turns: list[tuple[Response, ...]] = []
    reader = threading.Thread(target=lambda: turns.extend(zip(*reads, strict=True)), daemon=True)
    reader.start()
    reader.join(DEADLINE)
    assert not reader.is_alive()
    assert [[response.token for response in read] for read in zip(*turns, strict=True)] == want
    redrafter.close()


# Prompts


@pytest.mark.usefixtures("short_chunks")
def test_between_chunks_of_a_prompt_running_answers_take_their_steps(model: nn.Module) -> None:
    """Never two chunks in a row, and none larger than running answers can wait for."""
    redrafter = make(model, None)
    calls = Calls(redrafter)
    running = redrafter.stream([1, 2, 3], max_tokens=ENDLESS)
    next(running)
    tokens_of(redrafter, LONG, max_tokens=2)
    first = calls.made.index(("chunk", 32))
    last = len(calls.made) - calls.made[::-1].index(("chunk", 400 % 32))
    reading = calls.made[first:last]
    assert [size for kind, size in reading if kind == "chunk"] == [32] * 12 + [16]
    assert all(("step", 1) in reading[i : i + 2] for i in range(len(reading) - 1))
    running.close()
    redrafter.close()


@pytest.mark.parametrize(("speed", "largest"), [(1000, 512), (5000, 1000), (100_000, 2048)])
def test_a_prompt_alone_is_read_in_chunks_as_long_as_running_answers_would_wait(
    monkeypatch: pytest.MonkeyPatch, now: list[float], speed: int, largest: int
) -> None:
    """At once as much as mlx-lm's loop reads, where that takes less than a quarter of a second."""
    redrafter = make(byte_model(max_position_embeddings=8192), None)
    calls = Calls(redrafter)
    counted = redrafter.target.append

    def timed(tokens: mx.array, *rest: object) -> mx.array:
        now[0] += tokens.shape[1] / speed
        return counted(tokens, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(redrafter.target, "append", timed)
    tokens_of(redrafter, [5, 6] * 3000, max_tokens=2)
    sizes = calls.of("chunk")
    assert (sizes[0], max(sizes)) == (512, largest)
    assert min(sizes[1:-1]) >= largest - 1


@pytest.mark.parametrize(("speed", "slope"), [(1500, 2000), (300, 800)])
def test_chunks_that_slow_down_with_their_context_take_no_longer_than_answers_may_wait(
    monkeypatch: pytest.MonkeyPatch, now: list[float], speed: int, slope: int
) -> None:
    """At the end of the slower text, a chunk of 32 tokens would take 0.6 s."""
    waits = list[float]()
    redrafter = make(byte_model(max_position_embeddings=8192), None)
    running = redrafter.stream([1, 2, 3], max_tokens=ENDLESS)
    next(running)
    counted = redrafter.target.append

    def timed(tokens: mx.array, cache: object, position: int, *rest: object) -> mx.array:
        waits.append(tokens.shape[1] * (1 + position / slope) / speed)
        now[0] += waits[-1]
        return counted(tokens, cache, position, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(redrafter.target, "append", timed)
    tokens_of(redrafter, [5, 6] * 2000, max_tokens=2)
    assert max(waits) <= 0.25
    assert statistics.median(waits) > 0.17
    running.close()
    redrafter.close()


@pytest.mark.usefixtures("short_chunks")
def test_a_short_prompt_waits_for_one_chunk_of_a_long_one(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its first token, that is: at most one chunk and three steps."""
    redrafter = make(model, None)
    running = redrafter.stream([1, 2, 3], max_tokens=ENDLESS)
    next(running)
    calls, begun = Calls(redrafter), threading.Event()

    def on_prefill(read: int, _: int) -> None:
        """Wait, while the second chunk is read, for the other request."""
        if read == 64:
            begun.set()
            wait_for(lambda: redrafter.status.waiting > 0)
            calls.made.append(("submitted", 0))

    honest = Answer.read

    def read(answer: Answer, result: StepResult) -> bool:
        if answer.request.prompt == (9, 8):
            calls.made.append(("token", 0))
        return honest(answer, result)

    monkeypatch.setattr(Answer, "read", read)
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(
            lambda: list(redrafter.stream(LONG, max_tokens=2, on_prefill=on_prefill))
        )
        assert begun.wait(30)
        next(redrafter.stream([9, 8], max_tokens=2))
        long.result()
    after = calls.made[calls.made.index(("submitted", 0)) + 1 :]
    assert next(size for kind, size in after if kind == "chunk") == 2
    assert after.index(("chunk", 2)) <= 1
    waited = after[: after.index(("token", 0))]
    assert len([size for kind, size in waited if kind == "chunk" and size != 2]) <= 1
    assert len([size for kind, size in waited if kind == "step"]) <= 3
    assert after.count(("chunk", 32)) > 5, "the long one was not finished first"
    running.close()
    redrafter.close()


@pytest.mark.usefixtures("short_chunks")
def test_prompts_that_running_answers_can_wait_for_are_read_in_one_round(model: nn.Module) -> None:
    """Three prompts of ten tokens fit into the smallest chunk: one step is taken, not three."""
    redrafter = make(model, None)
    running = redrafter.stream([1, 2, 3], max_tokens=ENDLESS)
    next(running)
    calls, submitted = Calls(redrafter), threading.Event()

    def on_prefill(read: int, total: int) -> None:
        """Wait, while the first chunk of a long prompt is read, for the others."""
        if read < total:
            submitted.set()
            wait_for(lambda: redrafter.status.waiting == 3)

    with ThreadPoolExecutor(4) as pool:
        long = pool.submit(
            lambda: list(redrafter.stream([5] * 40, max_tokens=2, on_prefill=on_prefill))
        )
        assert submitted.wait(30)
        prompts = [[number] * 10 for number in (7, 8, 9)]
        waiting = [pool.submit(tokens_of, redrafter, prompt, max_tokens=2) for prompt in prompts]
        together = [one.result() for one in [long, *waiting]]
    sizes = [size for kind, size in calls.made if kind == "chunk"]
    assert sizes == [32, 8, 10, 10, 4, 6]
    first = calls.made.index(("chunk", 8))
    assert [kind for kind, _ in calls.made[first : first + 4]] == ["chunk"] * 4
    assert together[1:] == [tokens_of(redrafter, prompt, max_tokens=2) for prompt in prompts]
    running.close()
    redrafter.close()


@pytest.mark.usefixtures("short_chunks")
def test_a_prompt_is_indexed_beside_its_prefill_never_much_in_one_round(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompt lookup's index; a prefix in the cache, too, and drafts are those of a whole index."""
    shape = {"beam_width": 1, "beam_length": 4, "max_tokens": 12}
    whole = make(model, "lookup")
    want = [len(r.step.path) for r in whole.stream(LONG, **shape)]  # type: ignore[arg-type]
    monkeypatch.setattr("redrafter_mlx.engine.prompts.prompt_reader.MAX_INDEXED", 50)
    sizes: list[int] = []
    append = NgramIndex.append

    def counted(index: NgramIndex, tokens: abc.Sequence[int]) -> None:
        sizes.append(len(tokens))
        append(index, tokens)

    monkeypatch.setattr(NgramIndex, "append", counted)
    redrafter = make(model, "lookup")
    running = redrafter.stream([1, 2, 3], max_tokens=ENDLESS)
    next(running)
    told: list[tuple[int, int]] = []
    for most in (32, 50):  # the second time from the cache
        sizes.clear()
        told.clear()
        answer = redrafter.stream(LONG, on_prefill=lambda *n: told.append(n), **shape)  # type: ignore[arg-type]
        assert [len(r.step.path) for r in answer] == want
        assert max(sizes) == most
        assert sum(sizes) == len(LONG)
        assert told == sorted(set(told))
        assert told[-1] == (400, 400)
    running.close()
    redrafter.close()
    whole.close()


def test_the_caller_is_told_how_much_of_the_prompt_was_read(model: nn.Module) -> None:
    redrafter = make(model, None)
    told: list[tuple[int, int]] = []
    prompt = LONG * 3
    list(redrafter.stream(prompt[:500], max_tokens=1, on_prefill=lambda *n: told.append(n)))
    assert told == [(500, 500)]
    redrafter.close()


@pytest.mark.usefixtures("short_chunks")
def test_a_cancelled_request_is_not_read_to_its_end(model: nn.Module) -> None:
    redrafter = make(model, None)
    running = redrafter.stream([1, 2, 3], max_tokens=ENDLESS)
    next(running)
    calls = Calls(redrafter)

    async def cancel() -> None:
        reading = asyncio.Event()
        loop = asyncio.get_running_loop()

        async def consume() -> None:
            def on_prefill(*_: int) -> None:
                loop.call_soon_threadsafe(reading.set)

            async for _ in redrafter.astream(LONG, on_prefill=on_prefill):
                pass

        task = asyncio.create_task(consume())
        await reading.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert sum(calls.of("chunk")) < len(LONG)
    assert redrafter.status.running == 1
    running.close()
    assert redrafter.status.running == 0
    redrafter.close()


# Cached prefixes


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


# Memory


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


def limit_to(redrafter: Redrafter, slots: int) -> MemoryBudget:
    """Leave memory for so many cache slots; all that is held now counts as weights."""
    gc.collect()
    budget = redrafter.core.scheduler.memory
    budget.weights = mx.get_active_memory()
    budget.limit = budget.weights + budget.work + int(slots * budget.slot)
    return budget


def test_memory_is_reserved_for_a_drafters_cache_whatever_answered_last(model: nn.Module) -> None:
    """A draft model of the target's size doubles the bytes of a position."""
    redrafter = make(model, DraftModel(model, byte_tokenizer()))
    budget = redrafter.core.scheduler.memory
    of_target = budget.needed(1000)
    redrafter.generate([1, 2, 3], max_tokens=3)
    drafted = budget.needed(1000)
    assert drafted > 1.5 * of_target
    redrafter.generate([1, 2, 3], max_tokens=3, draft=False)
    assert budget.needed(1000) == drafted
    redrafter.close()


def test_memory_is_reserved_for_the_index_of_a_text(model: nn.Module) -> None:
    """Of those that run, too: the host keeps it, where MLX does not count."""
    plain, indexing = (make(model, each).core.scheduler.memory for each in (None, "lookup"))
    assert indexing.needed(1000) - plain.needed(1000) == 1000 * Lookup.bytes_per_token
    both = indexing.needed(1000, [500]) - plain.needed(1000, [500])
    assert both == 1500 * Lookup.bytes_per_token


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


def test_the_prefix_that_a_request_needs_is_dropped_after_all_others(model: nn.Module) -> None:
    redrafter = make(model, None)
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
    redrafter.close()


def test_no_prefix_is_dropped_for_an_answer_that_must_wait_all_the_same(model: nn.Module) -> None:
    redrafter = make(model, None)
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


def test_no_caller_waits_until_what_was_learned_is_recorded(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, record = threading.Event(), Tuner.record

    def recorded(tuner: Tuner, policy: TunedPolicy) -> None:
        assert told.wait(60), "the caller waits for it"
        record(tuner, policy)
        done.append(policy)

    done: list[TunedPolicy] = []
    monkeypatch.setattr(Tuner, "record", recorded)
    redrafter = make(model)
    redrafter.generate([1, 2], max_tokens=3)
    assert not done
    told.set()
    redrafter.close()
    assert done


def test_a_prompt_is_kept_together_with_its_length(model: nn.Module) -> None:
    """So that a later turn, whose prompt has another form of the answer, replaces it."""
    redrafter = make(model, None)
    redrafter.generate(LONG[:50], max_tokens=20)
    (entry,) = redrafter.core.scheduler.prefixes.cache.entries
    assert (entry.prompt, len(entry.tokens)) == (50, 69)
    redrafter.close()


def test_the_bytes_of_a_token_are_known_before_the_first_answer(model: nn.Module) -> None:
    redrafter = make(model, None)
    budget = redrafter.core.scheduler.memory
    known = budget.slot
    tokens_of(redrafter, LONG, max_tokens=3)
    assert budget.slot == known > 0
    redrafter.close()


def test_a_long_prompt_waits_until_all_rows_have_room_for_its_length(model: nn.Module) -> None:
    """A batch's rows are as long as the longest, and it is copied when one joins."""
    redrafter = make(model, None, prefix_bytes=0)
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
    redrafter.close()


def test_a_failed_engine_still_knows_the_bytes_of_a_token(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    redrafter = make(model)
    redrafter.generate([1, 2], max_tokens=3)
    redrafter.core.scheduler.memory.slot = 9.0  # as if measured
    with monkeypatch.context() as patched:
        patched.setattr(redrafter.target, "append", failing(1, redrafter.target.append))
        with pytest.raises(EngineFailedError):
            redrafter.generate([1, 2], max_tokens=3)
    assert redrafter.core.scheduler.memory.slot == 9.0
    redrafter.close()


def test_answers_beyond_the_limit_wait_for_their_turn(model: nn.Module) -> None:
    redrafter = make(model, None, max_batch=2)
    calls = Calls(redrafter)
    got: list[list[int]] = [[] for _ in PROMPTS]
    for i, response in redrafter.batch(PROMPTS, max_tokens=15):
        got[i].append(response.token)
    assert max(calls.of("step")) == 2
    assert got == [tokens_of(redrafter, p, max_tokens=15) for p in PROMPTS]
    redrafter.close()


def test_graphs_are_bounded_over_fifty_requests(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("redrafter_mlx.target_model.compiled.MAX_GRAPHS", 10)
    redrafter = make(model, "lookup")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 9, rng.integers(1, 60)).tolist() for _ in range(50)]
    assert {i for i, _ in redrafter.batch(prompts, max_tokens=4)} == set(range(50))
    assert len(redrafter.target.tree_call.graphs) <= 10
    redrafter.close()


# Failures and ends


def failing(
    times: int, honest: Callable[..., object], failed: threading.Event | None = None
) -> Callable[..., object]:
    """Return a function that raises at the given call, and then sets `failed`."""
    left = [times]

    def call(*args: object, **named: object) -> object:
        left[0] -= 1
        if left[0] == 0:
            if failed is not None:
                failed.set()
            raise RuntimeError("the device is lost")
        return honest(*args, **named)

    return call


def test_a_failure_ends_every_answer_with_an_error_and_the_engine_begins_anew(
    redrafter: Redrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = tokens_of(redrafter, PROMPTS[0], max_tokens=20)
    verify = redrafter.target.verify

    def lost(
        tree: object, cache: object, length: mx.array, *rest: object, **named: object
    ) -> object:
        if length.size == 3:  # all of them are decoded
            raise RuntimeError("the device is lost")
        return verify(tree, cache, length, *rest, **named)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(redrafter.target, "verify", lost)
        endless = {"max_tokens": ENDLESS}
        with ThreadPoolExecutor(3) as pool:
            futures = [pool.submit(tokens_of, redrafter, p, **endless) for p in PROMPTS[:3]]
            for future in futures:
                with pytest.raises(EngineFailedError, match="the device is lost"):
                    future.result()
    assert redrafter.status.running == redrafter.status.waiting == 0
    assert tokens_of(redrafter, PROMPTS[0], max_tokens=20) == want


@pytest.mark.parametrize(
    "part",
    [(Decoder, "new_cache"), (Decoder, "first"), (Prefill, "wait"), (PrefixCache, "keep"),
     (Tuner, "record")],
    ids=lambda part: part[1],
)  # fmt: skip
@pytest.mark.usefixtures("short_chunks")
def test_wherever_the_engine_fails_no_caller_waits_forever(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, part: tuple[type, str]
) -> None:
    """Wherever in a round it is. The next request is answered."""
    redrafter = make(model)
    want = tokens_of(redrafter, PROMPTS[0], max_tokens=20)
    (owner, name), failed = part, threading.Event()
    with monkeypatch.context() as patched, ThreadPoolExecutor(4) as pool:
        patched.setattr(owner, name, failing(1, getattr(owner, name), failed))
        several_chunks = "redrafter_mlx.engine.prompts.prompt_reader.MAX_TOKENS"
        patched.setattr(several_chunks, 100)
        prompts = [*PROMPTS[:3], LONG]
        futures = [pool.submit(tokens_of, redrafter, p, max_tokens=20) for p in prompts]
        errors = [future.exception(timeout=60) for future in futures]
        assert failed.wait(60), "some parts run only when all callers have their answers"
    assert {type(error) for error in errors} <= {EngineFailedError, type(None)}
    assert redrafter.status.running == redrafter.status.waiting == 0
    assert tokens_of(redrafter, PROMPTS[0], max_tokens=20) == want
    redrafter.close()


def test_a_failure_of_the_device_in_a_step_is_an_error_that_says_what_to_do(
    model: nn.Module,
) -> None:
    """A drafter of one's own that fails ends its own answers; the device computes for all."""

    class Failing(Oracle):
        def draft(self, *_: object) -> NoReturn:
            raise RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory")

    redrafter = make(model, Failing([1, 2], 258))
    with pytest.raises(EngineFailedError, match="--quantize"):
        redrafter.generate([1, 2, 3], beam_width=1, beam_length=3)


def test_an_idle_engine_leaves_all_cores_to_whatever_computes_next(
    redrafter: Redrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlx-lm's loop in a benchmark, for one; few query rows are computed with one core fewer."""
    said: list[str] = []
    monkeypatch.setattr(type(THREADS), "use_all_cores", lambda _: said.append("all"))
    monkeypatch.setattr(type(THREADS), "prepare_for", lambda _, rows: said.append(f"{rows} rows"))
    tokens_of(redrafter, PROMPTS[0], max_tokens=8, beam_width=1, beam_length=2)
    assert said[-1] == "all"
    assert "2 rows" in said


class Grammar:
    """A constraint that allows everything, and raises at one of its calls."""

    ended = False

    def __init__(self, method: str, calls: int) -> None:
        setattr(self, method, failing(calls, getattr(self, method)))

    def masks(self, tokens: abc.Sequence[int], parents: abc.Sequence[int]) -> None: ...

    def forced(self) -> abc.Sequence[int]:
        return ()

    def advance(self, token: int) -> None: ...


@pytest.mark.parametrize("method", ["masks", "advance", "forced"])
def test_an_error_of_a_grammar_ends_its_own_answer_alone(redrafter: Redrafter, method: str) -> None:
    want = tokens_of(redrafter, PROMPTS[0], max_tokens=40)
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(tokens_of, redrafter, PROMPTS[0], max_tokens=40)
        with pytest.raises(RuntimeError, match="the device is lost"):
            redrafter.generate(PROMPTS[1], max_tokens=40, constraint=Grammar(method, 3))
        assert other.result() == want


def of_size(*shape: int) -> Callable[..., object]:
    return lambda *_: np.full(shape, -1, np.int32)


@pytest.mark.parametrize(
    ("method", "returned"),
    [
        ("masks", of_size(1, 8)),
        ("masks", of_size(9)),
        ("masks", of_size(2, 9)),
        ("masks", lambda *_: np.full((1, 9), -1, np.int64)),
        ("masks", lambda *_: [[-1] * 9]),
        ("forced", lambda: None),
        ("forced", lambda: [258]),
        ("forced", lambda: [1.0]),
    ],
)
def test_what_a_grammar_must_not_return_ends_its_own_answer_alone(
    redrafter: Redrafter, method: str, returned: Callable[..., object]
) -> None:
    """A tree of one node in a vocabulary of 258 tokens has masks of shape [1, 9]."""
    want = tokens_of(redrafter, PROMPTS[0], max_tokens=40)
    grammar = Grammar(method, 0)
    setattr(grammar, method, returned)
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(tokens_of, redrafter, PROMPTS[0], max_tokens=40)
        with pytest.raises(BadInputError, match="the constraint"):
            redrafter.generate(PROMPTS[1], max_tokens=40, constraint=grammar)
        assert other.result() == want


@pytest.mark.parametrize(
    "call",
    [
        lambda r: r.generate(PROMPTS[1], max_tokens=2),
        lambda r: r.warm_up(),
        pytest.param(lambda r: r.tuning.measure(), marks=pytest.mark.exhaustive),
        lambda r: verify(r, [PROMPTS[1]], max_tokens=2),
    ],
    ids=["generate", "warm_up", "measure", "verify"],
)
def test_a_callback_that_calls_its_own_model_gets_an_error_and_does_not_wait_for_itself(
    redrafter: Redrafter, call: Callable[[Redrafter], object]
) -> None:
    def again(*_: object) -> NoReturn:
        call(redrafter)
        raise AssertionError("it was answered")

    with pytest.raises(BadInputError, match="own thread"):
        list(redrafter.stream(PROMPTS[0], max_tokens=3, on_prefill=again))
    for method in ("masks", "forced", "advance"):
        grammar = Grammar(method, 0)
        setattr(grammar, method, again)
        with pytest.raises(BadInputError, match="own thread"):
            redrafter.generate(PROMPTS[0], max_tokens=3, constraint=grammar)
    assert len(tokens_of(redrafter, PROMPTS[0], max_tokens=3)) == 3
    call(redrafter)  # from another thread


class Unavailable:
    """A lock that may not be asked for."""

    def __enter__(self) -> NoReturn:
        pytest.fail("it waited")

    def __exit__(self, *_: object) -> None: ...


def test_what_the_engines_own_thread_may_not_do_is_refused_before_it_begins(
    redrafter: Redrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a verification computes, and before a measurement waits for another one."""
    tuning = redrafter.tuning
    assert tuning is not None
    monkeypatch.setattr(tuning, "measuring", Unavailable())
    monkeypatch.setattr(
        "redrafter_mlx.verification.generate_step", lambda *_, **__: pytest.fail("it computed")
    )
    calls: tuple[Callable[..., Any], ...] = (
        lambda *_: verify(redrafter, [PROMPTS[1]], max_tokens=2, shape=BeamShape(2, 3)),
        lambda *_: tuning.measure(),
    )
    for call in calls:
        with pytest.raises(BadInputError, match="own thread"):
            list(redrafter.stream(PROMPTS[0], max_tokens=3, on_prefill=call))
    monkeypatch.undo()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("waits", ["thread", "event loop"])
def test_no_caller_waits_for_a_thread_that_is_gone(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    redrafter = make(model, None)
    monkeypatch.setattr(redrafter.target, "verify", failing(2, redrafter.target.verify))
    monkeypatch.setattr(redrafter.core, "fail", failing(1, redrafter.core.fail))

    async def consume() -> None:
        async for _ in redrafter.astream(PROMPTS[0], max_tokens=20):
            pass

    def ask() -> None:
        if waits == "thread":
            redrafter.generate(PROMPTS[0], max_tokens=20)
        else:
            asyncio.run(asyncio.wait_for(consume(), 60))

    with pytest.raises(EngineFailedError, match=r"gone .*RuntimeError: the device is lost"):
        ask()
    assert not redrafter.thread.alive
    with pytest.raises(EngineFailedError, match="the device is lost"):
        redrafter.generate(PROMPTS[0])


def test_a_caller_whose_event_loop_was_closed_ends_no_other_answer(redrafter: Redrafter) -> None:
    """Its loop was dropped without a chance to cancel the answer."""
    loop = asyncio.new_event_loop()
    left = redrafter.astream(PROMPTS[1], max_tokens=ENDLESS)
    running = redrafter.stream(PROMPTS[0], max_tokens=ENDLESS)
    next(running)
    loop.run_until_complete(anext(left))
    loop.close()
    try:
        tokens_of(redrafter, PROMPTS[2], max_tokens=20)  # as many steps later
        assert redrafter.status.running == 2
    finally:
        with pytest.raises(RuntimeError):  # it waits for its end in the loop
            left.athrow(GeneratorExit).send(None)


def test_closing_ends_running_answers_and_refuses_further_ones(model: nn.Module) -> None:
    redrafter = make(model)
    running = redrafter.stream([1, 2, 3], max_tokens=ENDLESS)
    next(running)
    redrafter.close()
    redrafter.close()
    with pytest.raises(EngineFailedError, match="closed"):
        list(running)
    with pytest.raises(EngineFailedError, match="closed"):
        redrafter.generate([1, 2, 3])
    assert not redrafter.thread.alive


def test_a_round_that_failed_keeps_no_memory(
    redrafter: Redrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error's frames held the scheduler, with every cache, until Python's collector ran."""
    monkeypatch.setattr(redrafter.target, "verify", failing(2, redrafter.target.verify))
    scheduler = weakref.ref(redrafter.core.scheduler)
    gc.disable()
    try:
        with pytest.raises(EngineFailedError):
            redrafter.generate(PROMPTS[0], max_tokens=20)
        wait_for(lambda: scheduler() is None)
    finally:
        gc.enable()


def test_an_answer_closed_by_the_thread_that_computes_is_not_waited_for(
    redrafter: Redrafter,
) -> None:
    """Python's collector closes a forgotten stream in whatever thread it happens to run."""
    running = redrafter.stream([1, 2, 3], max_tokens=ENDLESS)
    next(running)
    with redrafter.target.lock:
        running.close()
        with pytest.raises(BadInputError, match="own thread"):
            next(redrafter.stream([1, 2, 3]))
    wait_for(lambda: redrafter.status.running == 0)


def test_a_stream_that_would_wait_for_its_own_thread_is_refused(redrafter: Redrafter) -> None:
    """It was begun elsewhere; a callback of another answer asks for its next token."""
    running = redrafter.stream([1, 2, 3], max_tokens=ENDLESS)
    next(running)
    refused: list[str] = []

    def on_prefill(*_: int) -> None:
        if not refused:
            with pytest.raises(BadInputError, match="own thread") as error:
                next(running)
            refused.append(str(error.value))

    other = [*redrafter.stream([4, 5, 6], max_tokens=3, on_prefill=on_prefill)]
    assert (len(other), len(refused)) == (3, 1)
    wait_for(lambda: redrafter.status.running == 0)


def test_answers_in_progress_keep_their_model(model: nn.Module) -> None:
    async def all_of() -> list[int]:
        answers = make(model).astream([1, 2, 3], max_tokens=20)
        gc.collect()
        return [response.token async for response in answers]

    answers = make(model).batch([[1, 2, 3]], max_tokens=20)
    first = next(answers)[1].token
    gc.collect()
    assert [first, *(response.token for _, response in answers)] == asyncio.run(all_of())


def test_a_model_that_is_let_go_takes_its_thread_with_it(model: nn.Module) -> None:
    redrafter = make(model)
    stream = redrafter.stream([1, 2, 3], max_tokens=ENDLESS)
    next(stream)
    thread = redrafter.thread
    del redrafter, stream
    gc.collect()
    wait_for(lambda: not thread.alive)


def test_status_counts_what_runs_and_what_waits(model: nn.Module) -> None:
    redrafter = make(model, None, max_batch=1)
    began = redrafter.status.last_progress
    first, second = (redrafter.stream(p, max_tokens=ENDLESS) for p in PROMPTS[:2])
    next(first)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, second)
        wait_for(lambda: redrafter.status.waiting == 1)
        assert not waiting.done()
        assert redrafter.status.running == 1
        first.close()
        waiting.result(30)
    assert redrafter.status.last_progress > began
    second.close()
    assert (redrafter.status.running, redrafter.status.waiting) == (0, 0)
    redrafter.close()


_LEFT_OPEN = """
import sys
from tiny import byte_model, byte_tokenizer
from redrafter_mlx.engine.engine import Redrafter
model = Redrafter(byte_model(seed=1, max_position_embeddings=10**6), byte_tokenizer(), None)
stream = model.stream([1, 2, 3], max_tokens=10**5)
next(stream)
sys.exit(7)
"""


def test_a_process_may_end_in_the_midst_of_an_answer() -> None:
    ended = subprocess.run([sys.executable, "-c", _LEFT_OPEN], capture_output=True, timeout=60)
    assert ended.returncode == 7, ended.stderr.decode()


_IN_A_DAEMON = """
import asyncio, sys, threading, time
from tiny import byte_model, byte_tokenizer
from redrafter_mlx.engine.engine import Redrafter
model = Redrafter(byte_model(seed=1, max_position_embeddings=10**6), byte_tokenizer(), None)
begun, prompt = threading.Event(), [1, 2, 3]

def stream():
    for _ in model.stream(prompt, max_tokens=10**5):
        begun.set()

def again_and_again():
    while True:
        model.generate(prompt, max_tokens=4)
        begun.set()

def batch():
    for _ in model.batch([prompt, prompt], max_tokens=10**5):
        begun.set()

def asynchronously():
    async def answer():
        async for _ in model.astream(prompt, max_tokens=10**5):
            begun.set()
    asyncio.run(answer())

threading.Thread(target=globals()[sys.argv[1]], daemon=True).start()
begun.wait()
time.sleep(0.1)
"""


@pytest.mark.parametrize("door", ["stream", "again_and_again", "batch", "asynchronously"])
def test_a_daemon_thread_that_answers_at_the_end_of_the_process_ends_without_a_word(
    door: str,
) -> None:
    command = [sys.executable, "-c", _IN_A_DAEMON, door]
    ended = subprocess.run(command, capture_output=True, timeout=120)
    assert (ended.returncode, ended.stderr.decode()) == (0, "")


def test_a_model_that_was_closed_is_an_error_in_a_daemon_thread_too(model: nn.Module) -> None:
    """Only the end of the process is quiet."""
    redrafter, errors = make(model, None), list[Exception]()

    def answer() -> None:
        try:
            redrafter.generate([1, 2, 3], max_tokens=ENDLESS)
        except EngineFailedError as error:
            errors.append(error)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    wait_for(lambda: redrafter.status.running == 1)
    redrafter.close()
    thread.join(30)
    assert len(errors) == 1


@pytest.mark.parametrize(
    "attempt",
    [pickle.dumps, copy.copy, copy.deepcopy, lambda model: pickle.dumps(model.session())],
)
def test_a_model_is_neither_pickled_nor_copied(
    model: nn.Module, attempt: Callable[[Redrafter], object]
) -> None:
    with pytest.raises(BadInputError, match="load it in each process"):
        attempt(make(model, None))


def test_a_shape_that_a_static_tree_does_not_have_is_refused_at_once(model: nn.Module) -> None:
    """Before a response is requested."""

    class AlongTree(Oracle):
        tree = StaticTree(((0,), (1,), (0, 0)))

    redrafter = make(model, AlongTree([1, 2], 258))
    for ask in (redrafter.stream, redrafter.astream, redrafter.session().stream):
        with pytest.raises(BadInputError, match="beam_width is 7"):
            ask("Hi", beam_width=7)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ({"max_batch": 0}, "max_batch is 0"),
        ({"prefix_bytes": -1}, "prefix_bytes is -1"),
        ({"memory_bytes": "8GB"}, "memory_bytes is '8GB'"),
        ({"memory_bytes": 0}, "memory_bytes is 0"),
    ],
)
def test_limits_that_make_no_sense_are_refused(limits: dict, named: str) -> None:
    with pytest.raises(BadInputError, match=named):
        EngineOptions(**limits)


def test_options_know_their_sampling_parameters() -> None:
    options = GenerationOptions(temperature=0.5, top_k=3, max_tokens=9, seed=1)
    assert options.sampling.temperature == 0.5
    assert options.sampling == GenerationOptions(temperature=0.5, top_k=3, seed=2).sampling


def test_kept_texts_give_way_to_answers(model: nn.Module) -> None:
    redrafter = make(model, None)
    for n in range(4):
        redrafter.generate([n, *LONG[:200]], max_tokens=3)
    scheduler = redrafter.core.scheduler
    kept = scheduler.prefixes.cache.nbytes
    scheduler.memory.limit = mx.get_active_memory() + scheduler.memory.work
    redrafter.generate([9, 9], max_tokens=3, cache_prompt=False)
    assert scheduler.prefixes.cache.nbytes < kept
    redrafter.close()
