"""Files that a chat saves, loads and reads."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from screens import FakeSession, FakeToken
from scripted_chat import DOCSTRINGS, make_chat, piped, questions

from redrafter_mlx.cli.chat.command import run_chat
from redrafter_mlx.cli.terminal import Terminal
from redrafter_mlx.errors import BadInputError


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


def test_save_replaces_a_chat_and_nothing_else(tmp_path: Path) -> None:
    chat, other = tmp_path / "chat.json", tmp_path / "notes.txt"
    other.write_text("dear diary")
    got = piped("one", f"/save {chat}", "two", f"/save {chat}", f"/save {other}")
    assert len(json.loads(chat.read_text())["messages"]) == 4
    assert other.read_text() == "dear diary"
    assert f"{other} exists and is not a chat that /save wrote" in got.err


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
