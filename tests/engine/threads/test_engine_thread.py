"""The thread that computes: what runs in it, for whom, and how it ends."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from tiny import byte_tokenizer, random_drafter
from waiting import wait_for

from redrafter_mlx.bench.measure.methods import Method
from redrafter_mlx.bench.measure.runner import Runner
from redrafter_mlx.config import GenerationOptions
from redrafter_mlx.drafting.untrained.earlier import EarlierTexts
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.request import Request
from redrafter_mlx.engine.thread import EngineThread
from redrafter_mlx.errors import BadInputError, EngineFailedError
from redrafter_mlx.runtime.device import ModelLock
from redrafter_mlx.target_model.tree_check import check_trees

PROMPT = [3, 5, 7]


@pytest.fixture
def thread() -> Iterator[EngineThread]:
    made, lock = EngineThread(), ModelLock()
    made.enter(lock)
    yield made
    made.leave(lock, lambda: False)


def make(model: nn.Module, thread: EngineThread | None = None) -> Redrafter:
    drafter = random_drafter(vocab_size=258)
    return Redrafter(model, byte_tokenizer(), drafter, thread=thread)


def recorded(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """Replace a function by itself; return a list of the threads that will have called it."""
    module, _, function = name.rpartition(".")
    honest = getattr(__import__(module, fromlist=[function]), function)
    threads: list[int] = []

    def record(*given: object, **named: object) -> object:
        threads.append(threading.get_ident())
        return honest(*given, **named)

    monkeypatch.setattr(name, record)
    return threads


def test_all_that_computes_beside_an_engine_does_so_in_its_thread(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another thread would get workers of its own from the BLAS, and all would sleep and wake."""
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path))  # an earlier run's check is in the user's
    checks = recorded(monkeypatch, "redrafter_mlx.engine.exactness.check_trees")
    times: list[int] = []
    loops = recorded(monkeypatch, "redrafter_mlx.bench.measure.runner.make_sampler")
    batches = recorded(monkeypatch, "redrafter_mlx.bench.measure.runner.PlainBatch")
    redrafter = make(model)
    monkeypatch.setattr(redrafter.tuning, "measure", lambda *_: times.append(threading.get_ident()))
    redrafter.check()
    redrafter.measure()
    Runner({None: redrafter}).run(Method("mlx-lm"), PROMPT, 3, 0)
    together = Method("mlx-lm", batch_size=2)
    Runner({None: redrafter}).run_together(together, [PROMPT, PROMPT], 3, [0, 0])
    assert all([checks, times, loops, batches])
    threads = {*checks, *times, *loops, *batches}
    assert threads == {redrafter.thread.run(threading.get_ident)}
    assert threading.get_ident() not in threads


def test_engines_that_share_a_thread_answer_in_it_and_the_last_one_ends_it(
    model: nn.Module,
) -> None:
    first = make(model)
    want = first.generate(PROMPT, max_tokens=8).token_ids
    second = make(model, first.thread)
    running = first.stream(PROMPT, max_tokens=8)
    tokens = [next(running).token]
    assert second.generate(PROMPT, max_tokens=8).token_ids == want  # while the first one answers
    assert tokens + [response.token for response in running] == want
    first.close()
    with pytest.raises(EngineFailedError, match="closed"):
        first.generate(PROMPT)
    assert second.generate(PROMPT, max_tokens=8).token_ids == want
    second.close()
    assert not second.thread.alive
    with pytest.raises(EngineFailedError, match="gone"):
        second.thread.run(int)


def test_an_answer_waits_for_memory_that_another_engine_of_its_thread_uses(
    model: nn.Module,
) -> None:
    """The other answer holds it: it pauses, since nobody reads it."""
    asked = {"max_tokens": 8, "draft": False, "cache_prompt": False}
    first = make(model)
    second = make(model, first.thread)
    want = second.generate(PROMPT, **asked).token_ids
    running = first.stream(PROMPT * 100, max_tokens=150, logprobs=True, cache_prompt=False)
    budget = second.core.scheduler.memory
    gc.collect()
    slots = budget.slots(Request(tuple(PROMPT), GenerationOptions(max_tokens=8)))
    budget.limit = mx.get_active_memory() + budget.needed(slots) + 20_000
    next(running)
    assert budget.excess(budget.needed(slots)) > 0
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.generate, PROMPT, **asked)
        wait_for(lambda: second.status.waiting == 1 or waiting.done())
        for _ in range(3):  # rounds
            first.thread.run(int)
        running.close()
        assert waiting.result().token_ids == want
    first.close()
    second.close()


def test_what_the_host_keeps_of_ended_texts_is_counted_over_all_models(model: nn.Module) -> None:
    thread, engines = EngineThread(), list[Redrafter]()
    for tokens in (1000, 2000):
        texts = (EarlierTexts(tokens),)
        engines.append(Redrafter(model, byte_tokenizer(), host_drafters=texts, thread=thread))
        engines[-1].generate(PROMPT, max_tokens=2)
    each = [engine.core.scheduler.memory for engine in engines]
    assert [budget.host_bytes for budget in each] == [256_000, 512_000]
    for budget in each:
        budget.limit = 10**9
        free = budget.limit - mx.get_active_memory() - 768_000
        assert budget.excess(free) == 0
    engines.pop().close()
    del budget, each[1]
    gc.collect()
    assert thread.pool.host_bytes == 256_000
    engines.pop().close()


def test_an_answer_waits_for_memory_that_is_reserved_for_a_model_until_it_is_loaded(
    model: nn.Module,
) -> None:
    asked = {"max_tokens": 8, "draft": False, "cache_prompt": False}
    redrafter = make(model)
    want = redrafter.generate(PROMPT, **asked).token_ids
    budget, pool = redrafter.core.scheduler.memory, redrafter.thread.pool
    pool.reserved = budget.limit
    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(redrafter.generate, PROMPT, **asked)
        wait_for(lambda: redrafter.status.waiting == 1 or waiting.done())
        for _ in range(3):  # rounds
            redrafter.thread.run(int)
        assert not waiting.done()
        other = make(model, redrafter.thread)
        assert pool.reserved == 0
        assert waiting.result().token_ids == want
    redrafter.close()
    other.close()


def test_a_task_returns_its_result_or_raises_its_error(thread: EngineThread) -> None:
    assert thread.run(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        thread.run(lambda: 1 // 0)
    assert thread.run(lambda: 8) == 8


def test_a_task_that_asks_its_own_thread_is_refused(thread: EngineThread) -> None:
    with pytest.raises(BadInputError, match="own thread"):
        thread.run(lambda: thread.run(int))


def test_a_generator_that_the_collector_closes_in_the_thread_is_not_waited_for(
    thread: EngineThread,
) -> None:
    numbers = thread.iterate(number for number in range(10**9))
    next(numbers)
    closed = threading.Event()

    def close() -> None:
        numbers.close()
        closed.set()

    thread.submit(lambda: bool(close()))
    assert closed.wait(30)
    assert thread.run(lambda: 7) == 7


def test_a_task_that_failed_keeps_no_memory(thread: EngineThread) -> None:
    """Its error is kept, and its frames would be until the collector finds the cycle."""
    held: list[weakref.ref[set[int]]] = []

    def fails() -> None:
        arrays = {1, 2, 3}
        held.append(weakref.ref(arrays))
        raise MemoryError(len(arrays))

    gc.disable()
    try:
        with pytest.raises(MemoryError):
            thread.run(fails)
        assert held[0]() is None
    finally:
        gc.enable()


def test_a_thread_that_could_not_be_started_is_started_later(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    redrafter = make(model)
    monkeypatch.setattr(threading.Thread, "start", full)
    for _ in range(2):
        with pytest.raises(EngineFailedError, match="can't start new thread"):
            redrafter.generate(PROMPT, max_tokens=2)
    assert redrafter.status.waiting == 0
    monkeypatch.undo()
    assert len(redrafter.generate(PROMPT, max_tokens=2).token_ids) == 2
    redrafter.close()


@pytest.mark.parametrize("used", [False, True], ids=["unused", "used"])
def test_a_thread_that_all_users_have_left_serves_the_next_one(
    model: nn.Module, used: bool
) -> None:
    thread = EngineThread()
    first = make(model, thread)
    if used:
        first.generate(PROMPT, max_tokens=2)
    first.close()
    second = make(model, thread)
    for _ in range(2):
        assert len(second.generate(PROMPT, max_tokens=2).token_ids) == 2
    second.close()


def test_work_takes_turns_and_one_that_is_posted_twice_is_called_once_a_round(
    thread: EngineThread,
) -> None:
    calls: list[str] = []
    ready = threading.Event()

    def worker(name: str) -> Callable[[], bool]:
        def work() -> bool:
            calls.append(name)
            return calls.count(name) < 3

        return work

    thread.submit(lambda: not ready.wait())
    first, second = worker("a"), worker("b")
    for work in (first, second, first):
        thread.submit(work)
    ready.set()
    wait_for(lambda: len(calls) == 6)
    assert calls == ["a", "b"] * 3


def test_a_generator_that_is_closed_early_ends_in_the_thread(thread: EngineThread) -> None:
    ended: list[bool] = []

    def count() -> Generator[int, None, None]:
        try:
            yield from range(10**9)
        finally:
            ended.append(thread.is_current)

    with closing(thread.iterate(count())) as numbers:
        assert [next(numbers), next(numbers)] == [0, 1]
    assert ended == [True]


def test_a_measurement_that_is_interrupted_ends_before_its_caller_goes_on(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    redrafter = make(model)
    assert redrafter.tuning is not None
    began = threading.Event()

    def measure(tell: Callable[[float], None]) -> None:
        while True:
            tell(0.5)
            began.set()

    def interrupted(*_: object) -> None:
        assert began.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(redrafter.tuning, "measure", measure)
    monkeypatch.setattr(redrafter.thread, "next_event", interrupted)
    with pytest.raises(KeyboardInterrupt):
        redrafter.measure()
    monkeypatch.undo()
    assert check_trees(redrafter.target) < 1e-3
    redrafter.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whoever_waits_for_a_thread_that_has_died_gets_an_error(thread: EngineThread) -> None:
    def dies() -> bool:
        raise SystemExit

    def posts() -> Generator[int, None, None]:
        thread.submit(dies)
        while True:
            yield 1

    with pytest.raises(EngineFailedError, match="gone"):
        list(thread.iterate(posts()))
