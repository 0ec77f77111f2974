"""The chat's loop through a real terminal, and the ends of its process."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from scripted_chat import CHAT, Typist
from waiting import DEADLINE


@contextmanager
def chatting(cache: Path) -> Iterator[Typist]:
    """Start a chat, and wait for its first prompt."""
    typist = Typist(cache)
    try:
        typist.expect("fake-model")
        typist.expect(">>> ")
        yield typist
    finally:
        typist.close()


@pytest.fixture
def typist(tmp_path: Path) -> Iterator[Typist]:
    with chatting(tmp_path / "cache") as typist:
        yield typist


def test_a_terminal_session_survives_ctrl_c_and_clear(typist: Typist) -> None:
    typist.say("hello", 'turn 1: "hello"', "2.31 tokens/step")
    typist.say("again", 'turn 2: "again"')

    typist.type("count\n")
    typist.expect("3 4 5 ")
    typist.type("\x03")
    assert "^C" not in typist.expect("stopped"), "the key is not part of the answer"
    typist.expect(">>> ")
    typist.say("more", 'turn 4: "more"')

    typist.say("/clear", "conversation cleared")
    typist.say("anew", 'turn 1: "anew"')
    typist.type("\x04")
    assert typist.leave() == 0


def test_ctrl_c_before_the_first_token_stops_at_once_and_forgets_the_turn(typist: Typist) -> None:
    typist.type("think\n")
    typist.expect("think")
    time.sleep(0.05)  # the answer may or may not have started
    typist.type("\x03")
    typist.expect(">>> ")
    typist.say("hello", 'turn 1: "hello"')


def test_a_long_prompt_shows_one_line_of_progress_until_the_first_token(typist: Typist) -> None:
    typist.say("hello")
    assert not any(words in typist.seen for words in ("reading", "waiting", "\x1b[2K"))
    typist.type("long\n")
    typist.expect("reading the prompt: 15,000 of 30,000 tokens")
    typist.expect("reading the prompt: 20,000 of 30,000 tokens")
    before = typist.expect("turn 2:")
    assert "\n" not in before.replace("\r\n", "", 1)
    assert before.rstrip().endswith("\x1b[2K")


@pytest.mark.parametrize(
    ("message", "shown"),
    [("long", "15,000 of 30,000 tokens"), ("think", "waiting for the first token")],
)
def test_ctrl_c_while_the_line_of_progress_is_shown_stops_the_reading(
    typist: Typist, message: str, shown: str
) -> None:
    typist.type(f"{message}\n")
    typist.expect(shown)
    typist.type("\x03")
    assert "\x1b[2K" in typist.expect("stopped")
    typist.expect(">>> ")
    typist.say("hello", 'turn 1: "hello"')
    assert "30,000 of 30,000" not in typist.seen


def test_ctrl_c_at_the_prompt_gives_a_hint_and_drops_the_line(typist: Typist) -> None:
    typist.type("half a li\x03")
    typist.expect("Ctrl-D or /exit leaves", repeat="\x03")
    typist.expect(">>> ")
    for line in ('"""\n', "more\n"):
        typist.type(line)
        typist.expect("... ")
    typist.type("\x03")
    typist.expect("Ctrl-D or /exit leaves", repeat="\x03")
    typist.expect(">>> ")
    typist.say("whole", 'turn 1: "whole"')
    typist.type("/exit\n")
    assert typist.leave() == 0


def test_several_lines_can_be_typed(typist: Typist) -> None:
    typist.type('"""one\n')
    typist.expect("... ")
    typist.say('two"""', r'turn 1: "one\ntwo"')


def test_control_characters_of_an_answer_do_not_reach_the_terminal(typist: Typist) -> None:
    typist.say("escape", "red^[[31m^G\ufffd\ufffd!")


def test_lines_are_edited_and_remembered_from_chat_to_chat(tmp_path: Path) -> None:
    pytest.importorskip("readline")
    for keys in ("helo\x1b[Dl", "\x1b[A"):
        with chatting(tmp_path / "cache") as typist:
            typist.say(keys, 'turn 1: "hello"')
            typist.type("\x04")
            assert typist.leave() == 0
    assert (tmp_path / "cache" / "chat_history").stat().st_mode & 0o077 == 0


def test_two_chats_at_once_keep_the_lines_of_both(tmp_path: Path) -> None:
    pytest.importorskip("readline")
    with chatting(tmp_path / "cache") as one, chatting(tmp_path / "cache") as two:
        one.say("one", "turn 1: ")
        two.say("two", "turn 1: ")
        for typist in (one, two):
            typist.type("\x04")
            assert typist.leave() == 0
    assert (tmp_path / "cache" / "chat_history").read_text().split() == ["one", "two"]


def test_ctrl_c_ends_a_piped_chat_with_130() -> None:
    child = subprocess.Popen(
        CHAT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(b"count\n")
    child.stdin.flush()
    assert child.stdout.read(2) == b"0 "
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=DEADLINE)
    assert child.returncode == 130
    assert out.endswith(b"\n")
    assert err == b""


def test_a_reader_that_leaves_ends_the_chat_quietly() -> None:
    script = f"printf 'count\\n' | {' '.join(CHAT)} | head -c 4"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert (done.stdout, done.stderr) == ("0 1 ", "")
