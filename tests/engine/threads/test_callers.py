"""Callers in threads and in event loops, one or many."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx.nn as nn
import pytest
from engines import ENDLESS, PROMPT, PROMPTS, Build, begin, make, tokens_of
from mlx_lm.models.rope_utils import SuScaledRoPE
from tiny import byte_model, byte_tokenizer
from waiting import DEADLINE

from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.request import Answer
from redrafter_mlx.response import Response


def test_an_answer_cancelled_between_two_looks_at_it_ends(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller would wait for ever. Here the answer that waits is cancelled after each look."""
    honest = Answer.over.fget
    assert honest is not None

    def looked_at(answer: Answer) -> bool:
        over = honest(answer)
        if answer.request.prompt == (7, 8, 9):
            answer.cancel()
        return over

    redrafter = build(None, max_batch=1)
    running = begin(redrafter)
    monkeypatch.setattr(Answer, "over", property(looked_at))
    waiting = threading.Thread(target=lambda: list(redrafter.stream([7, 8, 9])), daemon=True)
    waiting.start()
    waiting.join(DEADLINE)
    assert not waiting.is_alive()
    running.close()


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


def test_any_thread_may_answer(model: nn.Module) -> None:
    with ThreadPoolExecutor(1) as loader:
        redrafter = loader.submit(make, model).result()
    want = redrafter.generate(PROMPT, max_tokens=20).token_ids
    with ThreadPoolExecutor(1) as other:
        assert other.submit(redrafter.generate, PROMPT, max_tokens=20).result().token_ids == want


def test_one_answer_may_be_read_from_several_threads(redrafter: Redrafter) -> None:
    """As in web frameworks, which call each `next` of a generator in any thread of a pool."""
    want = redrafter.generate(PROMPT, max_tokens=30, temperature=1.0, seed=3).token_ids
    stream = redrafter.stream(PROMPT, max_tokens=30, temperature=1.0, seed=3, logprobs=True)
    got: list[int] = []
    while True:
        box: list[Response | None] = []
        thread = threading.Thread(target=lambda box=box: box.append(next(stream, None)))
        thread.start()
        thread.join()
        if box[0] is None:
            break
        got.append(box[0].token)
        assert box[0].logprobs is not None
        assert box[0].logprobs.shape == (258,)
        assert box[0].logprobs[box[0].token].item() <= 0
    assert got == want


def test_callers_at_the_same_time_queue_up_and_each_gets_its_own_answer(
    redrafter: Redrafter,
) -> None:
    prompts = [[i, i + 1, i + 2] for i in range(6)]
    want = [redrafter.generate(p, max_tokens=25).token_ids for p in prompts]
    busy = threading.Semaphore(1)
    honest = redrafter.target.hidden

    def alone(*args: object) -> mx.array:
        assert busy.acquire(blocking=False), "two steps at once"
        try:
            return honest(*args)  # type: ignore[arg-type]
        finally:
            busy.release()

    redrafter.target.hidden = alone  # type: ignore[method-assign]
    with ThreadPoolExecutor(6) as pool:
        got = list(pool.map(lambda p: redrafter.generate(p, max_tokens=25).token_ids, prompts))
    assert got == want


def test_two_open_answers_in_one_thread_do_not_block_each_other(redrafter: Redrafter) -> None:
    want = [redrafter.generate(p, max_tokens=15).token_ids for p in (PROMPT, [9, 8])]
    streams = [redrafter.stream(p, max_tokens=15) for p in (PROMPT, [9, 8])]
    got = zip(*streams, strict=True)
    assert [list(t) for t in zip(*(tuple(r.token for r in pair) for pair in got), strict=True)] == (
        want
    )


def test_astream_gives_the_same_answer_and_leaves_the_loop_free(redrafter: Redrafter) -> None:
    want = redrafter.generate(PROMPT, max_tokens=20).token_ids

    async def main() -> tuple[list[int], int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        got = [r.token async for r in redrafter.astream(PROMPT, max_tokens=20)]
        ticking.cancel()
        return got, ticks

    got, ticks = asyncio.run(main())
    assert got == want
    assert ticks > 20


def test_a_cancelled_astream_leaves_the_model_usable(redrafter: Redrafter) -> None:
    want = redrafter.generate(PROMPT, max_tokens=20).token_ids

    async def main() -> None:
        async def consume() -> None:
            async for _ in redrafter.astream(PROMPT, max_tokens=10_000):
                pass

        task = asyncio.create_task(consume())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert redrafter.generate(PROMPT, max_tokens=20).token_ids == want


@pytest.mark.parametrize("scaled", [True, False])
def test_rotary_frequencies_can_be_used_by_the_engines_thread(scaled: bool) -> None:
    """They are lazy in mlx-lm's LongRoPE, and a thread cannot evaluate another one's arrays."""
    model = byte_model()
    if scaled:
        for layer in model.model.layers:
            dims = layer.self_attn.rope.dims
            layer.self_attn.rope = SuScaledRoPE(
                dims, max_position_embeddings=512, original_max_position_embeddings=64,
                short_factor=[1.0] * (dims // 2), long_factor=[2.0] * (dims // 2),
            )  # fmt: skip
    answer = Redrafter(model, byte_tokenizer()).generate([1, 2, 3], max_tokens=4)
    assert len(answer.token_ids) == 4
