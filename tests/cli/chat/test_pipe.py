"""The chat's loop through a pipe: messages, commands, options, statistics."""

from __future__ import annotations

import io

import pytest
from screens import Screen
from scripted_chat import DOCSTRINGS, make_chat, piped, questions

from redrafter_mlx.cli.chat.command import run_chat
from redrafter_mlx.cli.options import GENERATION
from redrafter_mlx.cli.terminal import Terminal


def test_a_pipe_gets_answers_on_stdout_and_statistics_on_stderr() -> None:
    got = piped("hello", "", "again")
    assert got.out == 'turn 1: "hello"\nturn 2: "again"\n'
    assert got.err == "2 tokens · 14.2 tok/s · 2.31 tokens/step\n" * 2
    assert got.status == 0


def test_three_quotes_make_one_message_of_several_lines() -> None:
    got = piped('"""first', " second", 'third"""', '"""', "/alone", '"""', '"""one"""', '""""""')
    sent = [m["content"] for m in got.chat.session.messages if m["role"] == "user"]
    assert sent == ["first\n second\nthird", "/alone", "one"]


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


def test_a_pipe_may_begin_with_a_byte_order_mark() -> None:
    got = piped("\ufeff/system S", "one")
    assert got.chat.session.system == "S"
    assert questions(got.chat) == ["one"]
