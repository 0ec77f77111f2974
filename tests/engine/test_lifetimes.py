"""How answers, models, threads and processes end."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable

import mlx.nn as nn
import pytest
from engines import ENDLESS, begin, make
from waiting import wait_for

from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import BadInputError, EngineFailedError


def test_closing_ends_running_answers_and_refuses_further_ones(model: nn.Module) -> None:
    redrafter = make(model)
    running = begin(redrafter)
    redrafter.close()
    redrafter.close()
    with pytest.raises(EngineFailedError, match="closed"):
        list(running)
    with pytest.raises(EngineFailedError, match="closed"):
        redrafter.generate([1, 2, 3])
    assert not redrafter.thread.alive


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
    stream = begin(redrafter)
    thread = redrafter.thread
    del redrafter, stream
    gc.collect()
    wait_for(lambda: not thread.alive)


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
    "attempt", [pickle.dumps, copy.copy, copy.deepcopy, lambda model: pickle.dumps(model.session())]
)
def test_a_model_is_neither_pickled_nor_copied(
    model: nn.Module, attempt: Callable[[Redrafter], object]
) -> None:
    with pytest.raises(BadInputError, match="load it in each process"):
        attempt(make(model, None))
