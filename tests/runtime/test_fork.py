"""Processes that are forked after a model was used."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
from tiny import byte_model, byte_tokenizer

from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import ForkedProcessError
from redrafter_mlx.loading.target import load_target
from redrafter_mlx.runtime.device import MLXProcess
from redrafter_mlx.verification import verify

_REFUSED, _ANSWERED = 3, 4


@pytest.fixture(scope="module")
def redrafter() -> Redrafter:
    """A model that has computed, so that MLX's threads are running."""
    made = Redrafter(byte_model(), byte_tokenizer(), None)
    made.generate([5, 6, 7], max_tokens=4)
    return made


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    "call",
    [
        lambda r: r.generate([5, 6, 7], max_tokens=4),
        lambda r: next(r.session().stream("Hi", max_tokens=4)),
        lambda r: next(r.stream("Hi", max_tokens=4)),
        lambda r: r.warm_up(),
        lambda r: verify(r, [[5, 6, 7]], max_tokens=4),
        lambda r: Redrafter(r.model, r.tokenizer, None),
        lambda _: load_target("/no/such/model"),
    ],
    ids=["generate", "session", "stream", "warm_up", "verify", "Redrafter", "load_target"],
)
def test_a_forked_process_gets_an_error_and_does_not_hang(
    call: Callable[[Redrafter], object], redrafter: Redrafter
) -> None:
    child = os.fork()
    if not child:
        try:
            call(redrafter)
            os._exit(_ANSWERED)
        except ForkedProcessError:
            os._exit(_REFUSED)
        finally:
            os._exit(1)
    begun = time.monotonic()
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > begun + 20:
            os.kill(child, 9)
        time.sleep(0.02)
    assert os.waitstatus_to_exitcode(ended[1]) == _REFUSED


def test_the_process_that_used_mlx_goes_on(redrafter: Redrafter) -> None:
    before = redrafter.generate([5, 6, 7], max_tokens=4).token_ids
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    assert redrafter.generate([5, 6, 7], max_tokens=4).token_ids == before


def test_a_process_that_was_forked_before_mlx_was_used_may_use_it() -> None:
    process = MLXProcess()
    child = os.fork()
    if not child:
        try:
            process.check()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    process.check()
