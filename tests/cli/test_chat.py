"""The chat's loop, through a real terminal and through a pipe, with a scripted model.

Run as a script, this file is that chat; the terminal tests start it this way.
"""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from screens import FakeModel, FakeSession, FakeToken, Screen
from waiting import DEADLINE

from redrafter_mlx.cli.chat.command import Chat, run_chat
from redrafter_mlx.cli.options import GENERATION
from redrafter_mlx.cli.terminal import Terminal
from redrafter_mlx.config import GenerationOptions
from redrafter_mlx.errors import BadInputError


def make_chat(terminal: Terminal) -> Chat:
    model = FakeModel()
    return Chat(model, model.session(), GenerationOptions(), terminal)


@dataclass(frozen=True)
class Piped:
    status: int
    out: str
    err: str
    chat: Chat


def piped(*lines: str) -> Piped:
    """Run a chat with these lines as input, whose output is not a terminal."""
    out, err = io.StringIO(), io.StringIO()
    chat = make_chat(Terminal(io.StringIO("".join(f"{x}\n" for x in lines)), out, err, False))
    return Piped(run_chat(chat), out.getvalue(), err.getvalue(), chat)


# Through a pipe.


def test_a_pipe_gets_answers_on_stdout_and_statistics_on_stderr() -> None:
    got = piped("hello", "", "again")
    assert got.out == 'turn 1: "hello"\nturn 2: "again"\n'
    assert got.err == "2 tokens · 14.2 tok/s · 2.31 tokens/step\n" * 2
    assert got.status == 0


def test_three_quotes_make_one_message_of_several_lines() -> None:
    got = piped('"""first', " second", 'third"""', '"""', "/alone", '"""', '"""one"""', '""""""')
    sent = [m["content"] for m in got.chat.session.messages if m["role"] == "user"]
    assert sent == ["first\n second\nthird", "/alone", "one"]


DOCSTRINGS = (
    '"""What the module does."""', "", "def f():", '    """One line."""', "    return 1", "",
    "def g():", '    """First.', "", "    More.", '    """', '    x = """a', 'b"""', "    return x",
)  # fmt: skip


def test_a_quoted_text_with_docstrings_arrives_whole() -> None:
    got = piped('"""', *DOCSTRINGS, '"""', "after", '""" ', "  one", '""" ')
    sent = [m["content"] for m in got.chat.session.messages if m["role"] == "user"]
    assert sent == ["\n".join(DOCSTRINGS), "after", "  one"]


@pytest.mark.parametrize("line", ['end"""', '    """', '"""one"""'])
def test_three_quotes_alone_are_closed_by_three_quotes_alone(line: str) -> None:
    got = piped('"""', line)
    assert got.chat.session.messages == []
    assert 'lacks its closing """ on a line of its own' in got.err


def test_quotes_that_are_never_closed_send_nothing() -> None:
    got = piped('"""first', "second")
    assert got.chat.session.messages == []
    assert got.err.startswith("error: ")
    assert got.err.count("\n") == 1
    assert '"""' in got.err
    assert got.status == 1


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("/nothing", "/nothing"),
        ("/hlep", "did you mean '/help'?"),
        ("/set temperature abc", "temperature is 'abc'"),
        ("/set temperature -1", "temperature is -1"),
        ("/set temperatur 1", "did you mean 'temperature'?"),
        ("/set max_tokens 1.5", "max_tokens is 1.5"),
        ("/set accept typical", "typical', which needs a temperature above 0"),
        ("/set accept typical", "leave accept at its default"),
        ("/set draft perhaps", "draft is 'perhaps'"),
        ("/set thinking perhaps", "thinking is 'perhaps'"),
        ("/set stop 'open", "open quotation mark"),
        ("/stats maybe", "not 'maybe'"),
        (f"/save {'x' * 300}", "File name too long"),
        ("/clear all", "/clear takes nothing"),
        ("/save", "/save needs a file"),
        ("/load", "/load needs a file"),
        ("/read", "/read needs a file"),
        ("/read /dev/zero", "/dev/zero: it is not a file"),
        ("/read /", "/: it is not a file"),
        ("/load /nowhere/at/all", "/nowhere/at/all: No such file"),
        ("/load /dev/zero", "/dev/zero cannot be read: it is a device, not a file"),
        ("/save /dev/null/no", "cannot write /dev/null/no"),
        ("bad \udcff byte", "not UTF-8"),
        ("refuse", "too long"),
        ("break", "the model broke"),
    ],
)
def test_an_error_is_one_line_and_the_chat_continues(line: str, named: str) -> None:
    got = piped(line, "/stats off", "after")
    errors = [x for x in got.err.splitlines() if x.startswith("error: ")]
    assert len(errors) == 1
    assert named in errors[0]
    assert '"after"' in got.out
    assert got.status == 1


def test_a_space_in_front_sends_a_slash_as_a_message() -> None:
    assert piped(" /help").chat.session.messages[0]["content"] == " /help"


def test_every_option_can_be_set_and_reset_by_its_name() -> None:
    values = {
        "max_tokens": ("9", 9), "temperature": ("0.5", 0.5), "top_p": ("0.9", 0.9),
        "top_k": ("3", 3), "min_p": ("0.1", 0.1), "seed": ("7", 7),
        "stop": ('a "b c"', ("a", "b c")), "beam_width": ("3", 3), "beam_length": ("5", 5),
        "max_nodes": ("8", 8), "draft": ("off", False), "accept": ("typical", "typical"),
        "epsilon": ("0.2", 0.2), "delta": ("0.3", 0.3), "repetition_penalty": ("1.2", 1.2),
        "frequency_penalty": ("0.3", 0.3), "presence_penalty": ("-1", -1.0),
        "thinking": ("off", False),
    }  # fmt: skip
    assert set(values) == set(GENERATION)
    lines = [f"/set {name} {text}" for name, (text, _) in values.items()]
    got = piped(*lines)
    chosen = {name: getattr(got.chat.options, name) for name in values}
    assert chosen == {name: value for name, (_, value) in values.items()}
    reset = piped(*lines, *(f"/set {name} default" for name in reversed(values)))
    assert reset.chat.options == reset.chat.defaults
    assert reset.chat.defaults.max_tokens == 1024
    assert piped("/set max_tokens 1k").chat.options.max_tokens == 1000
    assert piped("/set seed 7", "/set seed none").chat.options.seed is None


def test_a_refused_value_leaves_the_options_as_they_were() -> None:
    got = piped("/set top_k 5", "/set top_k x", "/set top_k -1", "hello")
    assert got.chat.session.options[-1].top_k == 5  # type: ignore[attr-defined]


def test_a_system_message_is_set_shown_and_removed() -> None:
    got = piped("/system Be brief.", "/system")
    assert got.chat.session.system == "Be brief."
    assert "system Be brief." in got.err
    assert piped("/system x", "/system none").chat.session.system is None


def test_statistics_can_be_switched_off_and_on() -> None:
    got = piped("/stats off", "one", "/stats on", "two")
    assert got.err.count("2 tokens · 14.2 tok/s · 2.31 tokens/step") == 1


def coloured(line: str) -> str:
    """Return what a chat with --show-drafts sends to a terminal."""
    out = Screen()
    chat = make_chat(Terminal(io.StringIO(line + "\n"), out, io.StringIO(), False))
    chat.show_drafts = True
    run_chat(chat)
    return out.getvalue()


def test_tokens_are_coloured_by_their_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert coloured("hello") == '\x1b[32mturn 1:\x1b[0m\x1b[4;36m "hello"\x1b[0m\n'
    assert coloured("escape") == "\x1b[32mred^[\x1b[0m\x1b[4;36m[31m^G\ufffd\ufffd!\x1b[0m\n"


@pytest.mark.parametrize("setting", [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_nothing_is_coloured_where_colours_are_not_wanted(
    monkeypatch: pytest.MonkeyPatch, setting: tuple[str, str]
) -> None:
    monkeypatch.setenv(*setting)
    assert coloured("hello") == 'turn 1: "hello"\n'


def test_the_statistics_line_says_how_much_was_drafted() -> None:
    err = io.StringIO()
    chat = make_chat(Terminal(io.StringIO("one\n"), io.StringIO(), err, False))
    chat.show_drafts = True
    run_chat(chat)
    assert "drafter 50%, lookup 50%" in err.getvalue()


def test_exit_leaves_at_once() -> None:
    assert piped("/exit", "never").out == ""


# Files.


def test_a_loaded_conversation_is_the_saved_one(tmp_path: Path) -> None:
    file = tmp_path / "my chat.json"
    before = piped("/system S", "one", f"/save '{file}'").chat
    after = piped("/set top_k 5", "two", f"/load {file}").chat
    assert after.session.messages == before.session.messages
    assert after.session.system == "S"
    assert after.options.top_k == 5
    assert [p.name for p in tmp_path.iterdir()] == [file.name]


def test_a_saved_conversation_can_be_read_in_any_language(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    before = piped("/system \u4f60\u597d", "one", f"/save {file}").chat
    assert "\u4f60\u597d" in file.read_text(encoding="utf-8")
    assert piped(f"/load {file}").chat.session.system == before.session.system


def test_a_pipe_may_begin_with_a_byte_order_mark() -> None:
    got = piped("\ufeff/system S", "one")
    assert got.chat.session.system == "S"
    assert questions(got.chat) == ["one"]


def test_save_replaces_a_chat_and_nothing_else(tmp_path: Path) -> None:
    chat, other = tmp_path / "chat.json", tmp_path / "notes.txt"
    other.write_text("dear diary")
    got = piped("one", f"/save {chat}", "two", f"/save {chat}", f"/save {other}")
    assert len(json.loads(chat.read_text())["messages"]) == 4
    assert other.read_text() == "dear diary"
    assert f"{other} exists and is not a chat that /save wrote" in got.err


def questions(chat: Chat) -> list[str]:
    return [m["content"] for m in chat.session.messages if m["role"] == "user"]


def test_read_sends_the_whole_file_once_and_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    text = "\n".join(DOCSTRINGS) + "\n/clear\n" + "\u00e9 x\n" * 20_000
    (tmp_path / "my code.py").write_text(text, encoding="utf-8")
    got = piped("/read ~/my code.py", "", "What is this?", "And this?")
    name = tmp_path / "my code.py"
    assert questions(got.chat) == [f"{name}\n```\n{text}```\n\nWhat is this?", "And this?"]
    assert f"{name} ({len(text):,} characters)" in got.err
    assert got.status == 0


def test_several_files_go_in_their_order_and_a_file_read_again_goes_once(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(b"\xef\xbb\xbfa\r\n")
    b.write_text("```sh\nls\n```")
    got = piped(f"/read {a}", f"/read '{b}'", f"/read {a}", "Compare.", "more")
    sent = f"{a}\n```\na\r\n```\n\n{b}\n````\n```sh\nls\n```\n````\n\nCompare."
    assert questions(got.chat) == [sent, "more"]


def test_the_size_of_a_file_is_in_tokens_where_they_can_be_counted(tmp_path: Path) -> None:
    def count(text: str) -> int:
        if len(text) > 20:
            raise BadInputError("the prompt has 21 tokens")
        return 1234

    for name, size in (("short", 20), ("long", 21)):
        (tmp_path / name).write_text("x" * size)
    err = io.StringIO()
    lines = f"/read {tmp_path}/short\n/read {tmp_path}/long\n"
    chat = make_chat(Terminal(io.StringIO(lines), io.StringIO(), err, False))
    chat.count_tokens = count
    run_chat(chat)
    assert f"{tmp_path}/short (1,234 tokens)" in err.getvalue()
    assert f"cannot read {tmp_path}/long: the prompt has 21 tokens" in err.getvalue()
    assert [*chat.files] == [f"{tmp_path}/short"]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "No such file"),
        (b"", "empty"),
        (b" \n", "empty"),
        (b"GIF89a\x00\x01", "not a text"),
        (b"caf\xe9", "at byte 3"),
        ("text".encode("utf-16"), "convert it to UTF-8"),
        (b"x" * 4_000_001, "more than 4 MB"),
    ],
)
def test_a_failed_read_changes_nothing(tmp_path: Path, content: bytes | None, named: str) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_text("fine\n")
    if content is not None:
        bad.write_bytes(content)
    got = piped(f"/read {good}", f"/read {bad}", "question")
    errors = [line for line in got.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert f"cannot read {bad}: " in errors[0]
    assert named in errors[0]
    assert questions(got.chat) == [f"{good}\n```\nfine\n```\n\nquestion"]


def test_a_file_stays_until_a_message_with_it_joins_the_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a"
    file.write_text("text")
    stream, refused = FakeSession.stream, ["too long"]

    def refuse_once(
        session: FakeSession, text: str, **more: Any
    ) -> Generator[FakeToken, None, None]:
        if refused:
            raise BadInputError(refused.pop())
        return stream(session, text, **more)

    monkeypatch.setattr(FakeSession, "stream", refuse_once)
    got = piped(f"/read {file}", "one", "two", "three", f"/read {file}", "/read none", "four")
    assert questions(got.chat) == [f"{file}\n```\ntext\n```\n\ntwo", "three", "four"]
    assert got.err.count(f"still with the next message: {file}") == 1


USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    "messages",
    [
        None,
        3,
        "ab",
        [1],
        [USER],
        [ASSISTANT, USER],
        [USER, {"role": "assistant"}],
        [USER, {**ASSISTANT, "content": 1}],
        [USER, {**ASSISTANT, "content": "\ud800"}],
        [USER, ASSISTANT, {"role": "system", "content": "s"}],
    ],
)
def test_a_file_that_is_wrong_anywhere_changes_nothing(tmp_path: Path, messages: object) -> None:
    file = tmp_path / "chat.json"
    file.write_text(json.dumps({"messages": messages}))
    got = piped("/system S", "one", f"/load {file}")
    assert re.search(f"^error: .*{re.escape(str(file))}", got.err, re.MULTILINE)
    assert [m["content"] for m in got.chat.session.messages] == ["one", 'turn 1: "one"']
    assert got.chat.session.system == "S"


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"3", b"null"])
def test_a_file_that_is_no_json_object_is_refused_in_one_line(
    tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "chat.json"
    file.write_bytes(content)
    got = piped(f"/load {file}")
    assert len(got.err.splitlines()) == 1
    assert got.err.startswith(f"error: {file} ")


# Through a terminal.


class Typist:
    """Simulates a person at a pseudo-terminal in which the chat runs."""

    def __init__(self, cache: Path) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            # Tests that run in the background may inherit an ignored SIGINT.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            environment = {**os.environ, "REDRAFTER_CACHE": str(cache), "TERM": "xterm"}
            os.execve(sys.executable, [sys.executable, __file__], environment)
        self._new = ""
        self.seen = ""

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def expect(self, text: str, repeat: str = "") -> str:
        """Wait until `text` appears after the text awaited before; return what precedes it.

        `repeat` is typed again every second, because a signal that arrives just before Python's
        readline begins to wait takes effect only with the next one.
        """
        began, repeated = time.monotonic(), 0
        while text not in self._new:
            elapsed = time.monotonic() - began
            assert elapsed < DEADLINE, f"{text!r} did not appear in {self._new!r}"
            if repeat and elapsed > repeated + 1:
                repeated += 1
                self.type(repeat)
            self._read(0.1)
        before, _, self._new = self._new.partition(text)
        return before

    def leave(self) -> int:
        """Read to the end; return the exit status."""
        until = time.monotonic() + DEADLINE
        while self._read(0.1):
            assert time.monotonic() < until, f"still running: {self._new!r}"
        self.seen += self._new
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._fd)

    def _read(self, seconds: float) -> bool:
        if not select.select([self._fd], [], [], seconds)[0]:
            return True
        try:
            read = os.read(self._fd, 65536).decode(errors="replace")
        except OSError:  # Linux reports this way that the other side has left
            return False
        self._new += read
        self.seen += read
        return read != ""


@pytest.fixture
def typist(tmp_path: Path) -> Iterator[Typist]:
    typist = Typist(tmp_path / "cache")
    yield typist
    typist.close()


def test_a_terminal_session_survives_ctrl_c_and_clear(typist: Typist) -> None:
    typist.expect("fake-model")
    typist.expect(">>> ")
    typist.type("hello\n")
    typist.expect('turn 1: "hello"')
    typist.expect("2.31 tokens/step")
    typist.expect(">>> ")
    typist.type("again\n")
    typist.expect('turn 2: "again"')
    typist.expect(">>> ")

    typist.type("count\n")
    typist.expect("3 4 5 ")
    typist.type("\x03")
    assert "^C" not in typist.expect("stopped"), "the key is not part of the answer"
    typist.expect(">>> ")
    typist.type("more\n")
    typist.expect('turn 4: "more"')
    typist.expect(">>> ")

    typist.type("/clear\n")
    typist.expect("conversation cleared")
    typist.expect(">>> ")
    typist.type("anew\n")
    typist.expect('turn 1: "anew"')
    typist.expect(">>> ")
    typist.type("\x04")
    assert typist.leave() == 0


def test_ctrl_c_before_the_first_token_stops_at_once_and_forgets_the_turn(typist: Typist) -> None:
    typist.expect(">>> ")
    typist.type("think\n")
    typist.expect("think")
    time.sleep(0.05)  # the answer may or may not have started
    typist.type("\x03")
    typist.expect(">>> ")
    typist.type("hello\n")
    typist.expect('turn 1: "hello"')


def test_a_long_prompt_shows_one_line_of_progress_until_the_first_token(typist: Typist) -> None:
    typist.expect(">>> ")
    typist.type("hello\n")
    typist.expect(">>> ")
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
    typist.expect(">>> ")
    typist.type(f"{message}\n")
    typist.expect(shown)
    typist.type("\x03")
    assert "\x1b[2K" in typist.expect("stopped")
    typist.expect(">>> ")
    typist.type("hello\n")
    typist.expect('turn 1: "hello"')
    assert "30,000 of 30,000" not in typist.seen


def test_ctrl_c_at_the_prompt_gives_a_hint_and_drops_the_line(typist: Typist) -> None:
    typist.expect(">>> ")
    typist.type("half a li\x03")
    typist.expect("Ctrl-D or /exit leaves", repeat="\x03")
    typist.expect(">>> ")
    typist.type('"""\n')
    typist.expect("... ")
    typist.type("more\n")
    typist.expect("... ")
    typist.type("\x03")
    typist.expect("Ctrl-D or /exit leaves", repeat="\x03")
    typist.expect(">>> ")
    typist.type("whole\n")
    typist.expect('turn 1: "whole"')
    typist.expect(">>> ")
    typist.type("/exit\n")
    assert typist.leave() == 0


def test_several_lines_can_be_typed(typist: Typist) -> None:
    typist.expect(">>> ")
    typist.type('"""one\n')
    typist.expect("... ")
    typist.type('two"""\n')
    typist.expect(r'turn 1: "one\ntwo"')
    typist.expect(">>> ")


def test_control_characters_of_an_answer_do_not_reach_the_terminal(typist: Typist) -> None:
    typist.expect(">>> ")
    typist.type("escape\n")
    typist.expect("red^[[31m^G\ufffd\ufffd!")
    typist.expect(">>> ")


def test_lines_are_edited_and_remembered_from_chat_to_chat(tmp_path: Path) -> None:
    pytest.importorskip("readline")
    for keys, line in (("helo\x1b[Dl\n", "hello"), ("\x1b[A\n", "hello")):
        typist = Typist(tmp_path / "cache")
        try:
            typist.expect(">>> ")
            typist.type(keys)
            typist.expect(f'turn 1: "{line}"')
            typist.expect(">>> ")
            typist.type("\x04")
            assert typist.leave() == 0
        finally:
            typist.close()
    assert (tmp_path / "cache" / "chat_history").stat().st_mode & 0o077 == 0


def test_two_chats_at_once_keep_the_lines_of_both(tmp_path: Path) -> None:
    pytest.importorskip("readline")
    both = [Typist(tmp_path / "cache") for _ in range(2)]
    try:
        for typist, line in zip(both, ("one\n", "two\n"), strict=True):
            typist.expect(">>> ")
            typist.type(line)
            typist.expect("turn 1: ")
            typist.expect(">>> ")
        for typist in both:
            typist.type("\x04")
            assert typist.leave() == 0
    finally:
        for typist in both:
            typist.close()
    assert (tmp_path / "cache" / "chat_history").read_text().split() == ["one", "two"]


def test_ctrl_c_ends_a_piped_chat_with_130() -> None:
    child = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
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
    script = f"printf 'count\\n' | {sys.executable} {__file__} | head -c 4"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert (done.stdout, done.stderr) == ("0 1 ", "")


if __name__ == "__main__":
    import typer

    from redrafter_mlx.cli import main

    @main.app.command("fake-chat")
    def fake_chat() -> None:
        raise typer.Exit(run_chat(make_chat(Terminal.standard())))

    main.tolerate_any_text()
    sys.exit(main.run(["fake-chat"]))
