"""Prompts are read in chunks that running answers can wait for."""

from __future__ import annotations

import asyncio
import statistics
import threading
from collections import abc
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace

import mlx.core as mx
import pytest
from engines import LONG, Build, Calls, begin, make, tokens_of
from tiny import byte_model, byte_tokenizer
from waiting import wait_for

from redrafter_mlx.decoding import built_step
from redrafter_mlx.decoding.acceptance import Report
from redrafter_mlx.decoding.step import Prefill
from redrafter_mlx.drafting.untrained.ngram import NgramIndex
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.request import Answer
from redrafter_mlx.response import StepResult


@pytest.mark.parametrize("where", ["cpu", "apple"])
def test_the_steps_between_chunks_do_not_make_them_smaller(
    monkeypatch: pytest.MonkeyPatch, now: list[float], where: str
) -> None:
    """Running answers wait for a chunk; their own step takes its time anyway.

    A CPU computes a chunk while it is submitted, a GPU after the step that was submitted before.
    """
    at_once = where == "cpu"
    monkeypatch.setattr("redrafter_mlx.engine.prompts.reading.backend", lambda: where)
    monkeypatch.setattr(built_step, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    redrafter = Redrafter(byte_model(), byte_tokenizer())
    running = begin(redrafter)
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


@pytest.mark.usefixtures("short_chunks")
def test_between_chunks_of_a_prompt_running_answers_take_their_steps(build: Build) -> None:
    """Never two chunks in a row, and none larger than running answers can wait for."""
    redrafter = build(None)
    calls = Calls(redrafter)
    running = begin(redrafter)
    tokens_of(redrafter, LONG, max_tokens=2)
    first = calls.made.index(("chunk", 32))
    last = len(calls.made) - calls.made[::-1].index(("chunk", 400 % 32))
    reading = calls.made[first:last]
    assert [size for kind, size in reading if kind == "chunk"] == [32] * 12 + [16]
    assert all(("step", 1) in reading[i : i + 2] for i in range(len(reading) - 1))
    running.close()


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
    running = begin(redrafter)
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
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its first token, that is: at most one chunk and three steps."""
    redrafter = build(None)
    running = begin(redrafter)
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


@pytest.mark.usefixtures("short_chunks")
def test_prompts_that_running_answers_can_wait_for_are_read_in_one_round(build: Build) -> None:
    """Three prompts of ten tokens fit into the smallest chunk: one step is taken, not three."""
    redrafter = build(None)
    running = begin(redrafter)
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


@pytest.mark.usefixtures("short_chunks")
def test_a_prompt_is_indexed_beside_its_prefill_never_much_in_one_round(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompt lookup's index; a prefix in the cache, too, and drafts are those of a whole index."""
    shape = {"beam_width": 1, "beam_length": 4, "max_tokens": 12}
    whole = build("lookup")
    want = [len(r.step.path) for r in whole.stream(LONG, **shape)]  # type: ignore[arg-type]
    monkeypatch.setattr("redrafter_mlx.engine.prompts.reading.MAX_INDEXED", 50)
    sizes: list[int] = []
    append = NgramIndex.append

    def counted(index: NgramIndex, tokens: abc.Sequence[int]) -> None:
        sizes.append(len(tokens))
        append(index, tokens)

    monkeypatch.setattr(NgramIndex, "append", counted)
    redrafter = build("lookup")
    running = begin(redrafter)
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


def test_the_caller_is_told_how_much_of_the_prompt_was_read(build: Build) -> None:
    redrafter = build(None)
    told: list[tuple[int, int]] = []
    prompt = LONG * 3
    list(redrafter.stream(prompt[:500], max_tokens=1, on_prefill=lambda *n: told.append(n)))
    assert told == [(500, 500)]


@pytest.mark.usefixtures("short_chunks")
def test_a_cancelled_request_is_not_read_to_its_end(build: Build) -> None:
    redrafter = build(None)
    running = begin(redrafter)
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
