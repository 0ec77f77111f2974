"""What is asked for in the engine's own thread, which cannot wait for itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
from engines import PROMPTS, Build, Grammar, begin, tokens_of
from waiting import wait_for

from redrafter_mlx.config import BeamShape
from redrafter_mlx.cpu.threads import THREADS
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.tuning.policy import TunedPolicy
from redrafter_mlx.tuning.tuner import Tuner
from redrafter_mlx.verification import verify


def test_no_caller_waits_until_what_was_learned_is_recorded(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, record = threading.Event(), Tuner.record

    def recorded(tuner: Tuner, policy: TunedPolicy) -> None:
        assert told.wait(60), "the caller waits for it"
        record(tuner, policy)
        done.append(policy)

    done: list[TunedPolicy] = []
    monkeypatch.setattr(Tuner, "record", recorded)
    redrafter = build()
    redrafter.generate([1, 2], max_tokens=3)
    assert not done
    told.set()
    redrafter.close()
    assert done


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


def test_an_answer_closed_by_the_thread_that_computes_is_not_waited_for(
    redrafter: Redrafter,
) -> None:
    """Python's collector closes a forgotten stream in whatever thread it happens to run."""
    running = begin(redrafter)
    with redrafter.target.lock:
        running.close()
        with pytest.raises(BadInputError, match="own thread"):
            next(redrafter.stream([1, 2, 3]))
    wait_for(lambda: redrafter.status.running == 0)


def test_a_stream_that_would_wait_for_its_own_thread_is_refused(redrafter: Redrafter) -> None:
    """It was begun elsewhere; a callback of another answer asks for its next token."""
    running = begin(redrafter)
    refused: list[str] = []

    def on_prefill(*_: int) -> None:
        if not refused:
            with pytest.raises(BadInputError, match="own thread") as error:
                next(running)
            refused.append(str(error.value))

    other = [*redrafter.stream([4, 5, 6], max_tokens=3, on_prefill=on_prefill)]
    assert (len(other), len(refused)) == (3, 1)
    wait_for(lambda: redrafter.status.running == 0)
