"""Conversations: turns that read only what is new, and stay consistent."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.session import Session
from redrafter_mlx.errors import BadInputError, EngineFailedError
from redrafter_mlx.response import Response


def turn(session: Session, text: str, n: int = 20) -> list[Response]:
    return list(session.stream(text, max_tokens=n))


def fresh_answer(redrafter: Redrafter, session: Session, text: str, n: int = 20) -> list[int]:
    system = [] if session.system is None else [{"role": "system", "content": session.system}]
    messages = [*system, *session.messages, {"role": "user", "content": text}]
    return redrafter.generate(messages, max_tokens=n, cache_prompt=False).token_ids


def test_every_turn_says_what_a_fresh_reading_of_the_conversation_would(
    redrafter: Redrafter,
) -> None:
    session = redrafter.session(system="Be brief.")
    for text in ("one", "two", "three"):
        want = fresh_answer(redrafter, session, text)
        assert [r.token for r in turn(session, text)] == want
    assert [m["role"] for m in session.messages] == ["user", "assistant"] * 3


def test_a_turn_reads_only_what_is_new(redrafter: Redrafter) -> None:
    session = redrafter.session()
    first = turn(session, "a rather long first message, to be read once")
    # Random bytes may be encoded as other tokens again; but the prompt is never read again.
    last = turn(session, "and")[-1]
    assert first[-1].cached_tokens == 0
    assert last.cached_tokens >= first[0].prompt_tokens
    assert last.prompt_tokens - last.cached_tokens < first[0].prompt_tokens


def test_changing_the_system_message_rereads_the_conversation(redrafter: Redrafter) -> None:
    session = redrafter.session(system="Be brief.")
    turn(session, "one")
    session.system = "Be long."
    want = fresh_answer(redrafter, session, "two")
    assert [r.token for r in turn(session, "two")] == want


@pytest.mark.parametrize("after", [1, 2, 7])
def test_a_closed_answer_keeps_what_was_said_and_the_session_goes_on(
    redrafter: Redrafter, after: int
) -> None:
    session = redrafter.session()
    turn(session, "one")
    stream = session.stream("two", max_tokens=30)
    given = [next(stream).text for _ in range(after)]
    stream.close()
    assert session.messages[-1] == {"role": "assistant", "content": "".join(given)}
    want = fresh_answer(redrafter, session, "three")
    assert [r.token for r in turn(session, "three")] == want


def test_an_exception_in_the_consumer_leaves_the_session_consistent(redrafter: Redrafter) -> None:
    session = redrafter.session()

    def consume() -> None:
        for i, _ in enumerate(session.stream("one", max_tokens=30)):
            _ = 1 // (3 - i)

    with pytest.raises(ZeroDivisionError):
        consume()
    want = fresh_answer(redrafter, session, "two")
    assert [r.token for r in turn(session, "two")] == want


@pytest.mark.parametrize("at", range(1, 8))
def test_an_interrupt_inside_a_step_leaves_the_session_consistent(
    redrafter: Redrafter, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C can arrive in any call of the target, also in the prompt's."""
    session = redrafter.session()
    turn(session, "one")
    calls = 0

    def interrupting(honest: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **named: object) -> object:
            nonlocal calls
            calls += 1
            if calls == at:
                os.kill(os.getpid(), signal.SIGINT)
            return honest(*args, **named)

        return call

    with monkeypatch.context() as patched:
        for name in ("hidden", "verify"):
            patched.setattr(redrafter.target, name, interrupting(getattr(redrafter.target, name)))
        with pytest.raises(KeyboardInterrupt):
            turn(session, "two", 400)
    answered = session.messages[2:]  # empty if the interrupt came before the first token
    assert [m["role"] for m in answered] in ([], ["user", "assistant"])
    assert all(m["content"] for m in answered)
    want = fresh_answer(redrafter, session, "three")
    assert [r.token for r in turn(session, "three")] == want


def test_a_turn_that_stops_before_its_first_token_is_forgotten(
    redrafter: Redrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = redrafter.session()
    turn(session, "one")
    before = list(session.messages)

    def broken(*_: object) -> None:
        raise ValueError("broken")

    with monkeypatch.context() as patched:
        patched.setattr(redrafter.target, "hidden", broken)
        with pytest.raises(EngineFailedError, match="broken"):
            turn(session, "two")
    assert session.messages == before
    session.stream("two").close()
    assert session.messages == before


def test_an_answer_that_ends_without_a_text_is_kept(redrafter: Redrafter) -> None:
    session = redrafter.session()
    first = turn(session, "one", 1)[0].token
    session.clear()
    redrafter.tokenizer.eos_token_ids = {first}
    assert [r.finish_reason for r in turn(session, "one")] == ["stop"]
    assert [m["content"] for m in session.messages] == ["one", ""]


def test_a_session_answers_one_turn_at_a_time(redrafter: Redrafter) -> None:
    session = redrafter.session()
    running = session.stream("one", max_tokens=20)
    first = next(running).text
    with ThreadPoolExecutor(1) as other, pytest.raises(BadInputError, match="another turn"):
        other.submit(turn, session, "two").result()
    answer = first + "".join(r.text for r in running)
    assert [m["content"] for m in session.messages] == ["one", answer]
    want = fresh_answer(redrafter, session, "two")
    assert [r.token for r in turn(session, "two")] == want


def test_a_turn_is_over_when_its_finish_reason_is_read(redrafter: Redrafter) -> None:
    session = redrafter.session()
    first = session.stream("one", max_tokens=3)
    while next(first).finish_reason is None:
        pass
    assert turn(session, "two")
    assert list(first) == []
    assert [m["content"] for m in session.messages][::2] == ["one", "two"]


def test_turns_of_many_threads_leave_whole_turns(redrafter: Redrafter) -> None:
    session = redrafter.session()

    def ask(i: int) -> bool:
        try:
            turn(session, f"question {i}", 5)
        except BadInputError:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        answered = sum(pool.map(ask, range(12)))
    assert 1 <= answered == len(session.messages) // 2
    assert [m["role"] for m in session.messages] == ["user", "assistant"] * answered
    want = fresh_answer(redrafter, session, "last")
    assert [r.token for r in turn(session, "last")] == want


def test_a_turn_follows_those_that_ended_before_its_first_token(redrafter: Redrafter) -> None:
    session = redrafter.session()
    later = session.stream("two", max_tokens=20)
    turn(session, "one")
    want = fresh_answer(redrafter, session, "two")
    assert [r.token for r in later] == want


def test_a_cleared_session_is_a_new_one(redrafter: Redrafter) -> None:
    session = redrafter.session()
    first = [r.token for r in turn(session, "one")]
    turn(session, "two")
    session.clear()
    assert session.messages == []
    assert [r.token for r in turn(session, "one")] == first


def test_an_empty_turn_is_refused_and_changes_nothing(redrafter: Redrafter) -> None:
    session = redrafter.session()
    with pytest.raises(BadInputError, match="empty"):
        session.stream("  \n")
    assert session.messages == []
