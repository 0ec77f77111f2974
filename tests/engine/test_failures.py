"""Failures end the answers that they concern, with an error that says what to do."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import mlx.core as mx
import numpy as np
import pytest
from engines import ENDLESS, LONG, PROMPTS, Build, Grammar, failing, tokens_of
from waiting import wait_for

from redrafter_mlx.decoding.cache.prefix_cache import PrefixCache
from redrafter_mlx.decoding.step import Decoder, Prefill
from redrafter_mlx.drafting.oracle import Oracle
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import BadInputError, EngineFailedError
from redrafter_mlx.tuning.tuner import Tuner


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
    build: Build, monkeypatch: pytest.MonkeyPatch, part: tuple[type, str]
) -> None:
    """Wherever in a round it is. The next request is answered."""
    redrafter = build()
    want = tokens_of(redrafter, PROMPTS[0], max_tokens=20)
    (owner, name), failed = part, threading.Event()
    with monkeypatch.context() as patched, ThreadPoolExecutor(4) as pool:
        patched.setattr(owner, name, failing(1, getattr(owner, name), failed))
        several_chunks = "redrafter_mlx.engine.prompts.reading.MAX_TOKENS"
        patched.setattr(several_chunks, 100)
        prompts = [*PROMPTS[:3], LONG]
        futures = [pool.submit(tokens_of, redrafter, p, max_tokens=20) for p in prompts]
        errors = [future.exception(timeout=60) for future in futures]
        assert failed.wait(60), "some parts run only when all callers have their answers"
    assert {type(error) for error in errors} <= {EngineFailedError, type(None)}
    assert redrafter.status.running == redrafter.status.waiting == 0
    assert tokens_of(redrafter, PROMPTS[0], max_tokens=20) == want


def test_a_failure_of_the_device_in_a_step_is_an_error_that_says_what_to_do(build: Build) -> None:
    """A drafter of one's own that fails ends its own answers; the device computes for all."""

    class Failing(Oracle):
        def draft(self, *_: object) -> NoReturn:
            raise RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory")

    redrafter = build(Failing([1, 2], 258))
    with pytest.raises(EngineFailedError, match="--quantize"):
        redrafter.generate([1, 2, 3], beam_width=1, beam_length=3)


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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("waits", ["thread", "event loop"])
def test_no_caller_waits_for_a_thread_that_is_gone(
    build: Build, monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    redrafter = build(None)
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
