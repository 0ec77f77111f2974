"""`chat --server`: it behaves as with a model in this process; servers that fail."""

from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path

import pytest
from command_line import CommandLine
from screens import FakeModel
from serving import figure, hold, ready, tiny_redrafter
from streams import answering, chunk, streamed
from waiting import wait_for

from redrafter_mlx.bench.measure.load_client import Server
from redrafter_mlx.cli.chat.command import Chat, run_chat
from redrafter_mlx.cli.chat.remote import RemoteModel, RemoteSession, connect
from redrafter_mlx.cli.terminal import Terminal
from redrafter_mlx.config import GenerationOptions
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.session import Session
from redrafter_mlx.errors import ServerError

KEY = "a-key-of-ours"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
LINES = ("hello hello hello", "/set temperature 0.9", "/set presence_penalty 0.7", "/set seed 5",
         "and again")  # fmt: skip


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """A server with one tiny model."""
    with ready(tiny_redrafter()) as url:
        yield url


@pytest.fixture(scope="module")
def locked() -> Iterator[str]:
    """A server that requires a key."""
    with ready(tiny_redrafter(), api_key=KEY) as url:
        yield url


def chatted(
    model: Redrafter | RemoteModel, session: Session | RemoteSession, *lines: str
) -> tuple[int, str, str]:
    """Return the status, stdout and stderr of a chat whose input is these lines."""
    out, err = io.StringIO(), io.StringIO()
    terminal = Terminal(io.StringIO("".join(f"{x}\n" for x in lines)), out, err, False)
    status = run_chat(
        Chat(model, session, GenerationOptions(max_tokens=40), terminal, show_drafts=True)
    )
    return status, out.getvalue(), err.getvalue()


def test_a_server_and_a_loaded_model_give_the_same_conversation(served: str) -> None:
    loaded = tiny_redrafter()
    here = chatted(loaded, loaded.session("Be brief."), *LINES)
    model, server = connect(served, None, None)
    session = RemoteSession(server, "Be brief.")
    there = chatted(model, session, *LINES)
    assert there[:2] == here[:2]
    assert here[1].strip()
    assert "lookup" in there[2].splitlines()[-1]
    assert model.drafting == loaded.drafting
    assert [m["role"] for m in session.messages] == ["user", "assistant"] * 2


def test_each_token_comes_with_its_source_and_only_the_end_without(served: str) -> None:
    _, server = connect(f"{served}/v1/", "tiny", None)
    options, before = GenerationOptions(max_tokens=60), figure(served, ACCEPTED)
    *tokens, end = RemoteSession(server, None).stream("hello hello hello", options=options)
    local = list(tiny_redrafter().session().stream("hello hello hello", options=options))
    assert [t.text for t in tokens] == [r.text for r in local]
    by_lookup = sum(t.source == "lookup" for t in tokens)
    assert 0 < by_lookup <= figure(served, ACCEPTED) - before  # the last step may be cut off
    assert len(tokens) - by_lookup in (end.steps, end.steps + 1)
    assert (end.text, end.source, end.finish_reason) == ("", None, local[-1].finish_reason)
    assert end.generation_tokens == len(tokens)
    assert end.tokens_per_step == pytest.approx((len(tokens) - 1) / end.steps, abs=1e-3)


@pytest.mark.parametrize("remote", [False, True])
def test_reported_progress_rises_to_the_length_of_the_prompt(served: str, remote: bool) -> None:
    loaded, text = tiny_redrafter(), "0123456789" * 120
    length = len(loaded.encode(text))
    session = RemoteSession(connect(served, None, None)[1], None) if remote else loaded.session()
    told: list[tuple[int, int]] = []
    options = GenerationOptions(max_tokens=2)
    answer = session.stream(text, options=options, on_prefill=lambda *n: told.append(n))
    next(answer)
    answer.close()
    assert told == sorted(set(told))
    assert len(told) > 1
    assert told[-1] == (length, length)
    assert {total for _, total in told} == {length}


def test_an_answer_that_is_left_ends_on_the_server() -> None:
    model = tiny_redrafter()
    hold(model, 40)
    with ready(model) as url:
        _, server = connect(url, None, None)
        session = RemoteSession(server, None)
        answer = session.stream("hello", options=GenerationOptions(max_tokens=400))
        text = "".join(next(answer).text for _ in range(20))
        answer.close()
        assert session.messages[-1] == {"role": "assistant", "content": text}
        wait_for(lambda: figure(url, "vllm:num_requests_running") == 0)
        assert figure(url, "vllm:generation_tokens_total") < 400


def listing(*models: str, **more: object) -> Callable[..., list[dict[str, object]]]:
    return lambda _: [{"id": name, **more} for name in models]


def test_of_a_foreign_servers_models_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may list every model that it could load, and would load the first."""
    monkeypatch.setattr(Server, "models", listing("a", "b"))
    with pytest.raises(ServerError, match="--model: a, b"):
        connect("http://localhost:1", None, None)
    for name in ("b", "default_model"):
        assert connect("http://localhost:1", name, None)[1].model == name
    monkeypatch.setattr(Server, "models", listing("a"))
    assert connect("http://localhost:1", None, None)[1].model == "a"
    monkeypatch.setattr(Server, "models", listing("a", "b", x_redrafter={"loaded": True}))
    assert connect("http://localhost:1", None, None)[1].model == "a"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--server", "localhost"], "localhost"),
        (["--server", "http://localhost:port"], "localhost:port"),
        (["--server", "http://local host/"], "no server's URL"),
        (["--server", "http://localhost/v 1"], "no server's URL"),
        (["--server", "http://localhost/v\u00e9"], "no server's URL"),
        (["--server", "http://a..b/v1"], "no server's URL"),
        (["--server", "http://me:secret[x@localhost/v1"], "--api-key"),
        (["--server", "http://me:secret@localhost/v1"], "--api-key"),
        (["--server", "http://localhost", "--api-key", "secret\nkey"], "--api-key"),
        (["--server", "http://localhost", "--api-key", "secret-clé"], "--api-key"),
        (["--server", "http://127.0.0.1:9"], "redrafter-mlx serve"),
        (["--server", "URL"], "--api-key"),
        (["--server", "URL", "--api-key", "another"], "--api-key"),
        (["--server", "URL", "--api-key", KEY, "--model", "other"], "it has: tiny"),
        (["--server", "URL", "--drafter", "none"], "--drafter is the server's"),
        (["--server", "URL", "--quantize", "4"], "--quantize is the server's"),
    ],
)
def test_a_server_that_cannot_be_used_is_one_line(
    locked: str, arguments: list[str], named: str, cli: CommandLine
) -> None:
    said = cli.error("chat", *(locked if a == "URL" else a for a in arguments))
    assert named in said
    assert "secret" not in said


@pytest.mark.parametrize("line", ["/set beam_width 3", "/set accept greedy"])
def test_an_option_that_no_request_can_have_is_refused(served: str, line: str) -> None:
    model, server = connect(served, None, None)
    status, out, err = chatted(model, RemoteSession(server, None), line, "hello")
    assert (status, out) == (1, "")
    assert f"error: {line.split()[1]} is" in err


@pytest.mark.parametrize(
    ("status", "text", "named", "kept"),
    [
        (503, '{"error": {"message": "the queue is full"}}', "503: the queue is full", ""),
        (200, streamed(chunk("half"), end=False), "broke", "half"),
        (200, streamed(chunk("half"), {"error": {"message": "it failed"}}), "it failed", "half"),
        (200, "data: {no JSON\n\n", "OpenAI's API", ""),
        (200, "data: [1]\n\n", "OpenAI's API", ""),
        (200, streamed(chunk("half"), {"choices": ["x"]}), "OpenAI's API", "half"),
        (200, streamed({"choices": [{"delta": {"content": 5}}]}), "OpenAI's API", ""),
        (200, streamed({"x_redrafter": {"prefill": {"read": "a"}}}), "OpenAI's API", ""),
        (200, streamed({"x_redrafter": [1]}), "OpenAI's API", ""),
    ],
)
def test_an_answer_that_breaks_off_is_an_error_and_its_text_is_kept(
    status: int, text: str, named: str, kept: str
) -> None:
    with answering(lambda _: (status, text)) as url:
        session = RemoteSession(Server(url), None)
        got = chatted(FakeModel(), session, "first", "second")
        assert got[0] == 1
        assert got[2].count("error: ") == 2
        assert named in got[2]
        answers = [m["content"] for m in session.messages if m["role"] == "assistant"]
        assert answers == [kept] * 2 if kept else answers == []
        with pytest.raises(ServerError):
            list(session.stream("third", options=GenerationOptions()))


def test_text_that_a_server_held_back_is_shown_whole() -> None:
    """The chunk's text is not the joined text of its tokens."""
    tokens = [{"id": 1, "text": "a", "source": "lookup"}, {"id": 2, "text": "b", "source": "model"}]
    held = {**chunk("zab"), "x_redrafter": {"tokens": tokens, "step": 1}}
    with answering(lambda _: (200, streamed(held))) as url:
        answer = RemoteSession(Server(url), None).stream("x", options=GenerationOptions())
        assert [(t.text, t.source) for t in answer] == [("", "lookup"), ("zab", "model")]


def test_half_a_surrogate_pair_of_a_server_does_not_make_a_conversation_unreadable(
    tmp_path: Path,
) -> None:
    file = tmp_path / "chat.json"
    with answering(lambda _: (200, streamed(chunk("a\ud83d"), chunk("b\ud83d\ude00")))) as url:
        session = RemoteSession(Server(url), None)
        got = chatted(FakeModel(), session, "hello", f"/save {file}", f"/load {file}")
    assert got[0] == 0, got
    assert session.messages[-1]["content"] == "a\ufffdb\U0001f600"


def test_one_ctrl_c_ends_an_answer_of_a_server_that_falls_silent() -> None:
    """There is no cache here that an interruption could damage."""

    class Stalled(Server):
        def stream(self, body: Mapping[str, object]) -> Generator[dict[str, object], None, None]:
            yield next(super().stream(body))
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(20)
            pytest.fail("the answer went on")

    with answering(lambda _: (200, streamed(chunk("half"), end=False))) as url:
        session = RemoteSession(Stalled(url), None)
        with pytest.raises(KeyboardInterrupt):  # in a pipe it ends the chat, too
            chatted(FakeModel(), session, "hello")
    assert session.messages[-1]["content"] == "half"


def test_reasoning_is_shown_and_stays_out_of_the_conversation() -> None:
    """One step may end the reasoning and begin the answer; the first chunk has all its tokens."""
    tokens = [{"id": 1, "text": "Hm</think>", "source": "drafter"},
              {"id": 2, "text": "Yes", "source": "model"}]  # fmt: skip
    thought = {"choices": [{"index": 0, "delta": {"reasoning_content": "Hm"}}]}
    chunks = {**thought, "x_redrafter": {"tokens": tokens, "step": 1}}, chunk("Yes")
    with answering(lambda _: (200, streamed(*chunks))) as url:
        session = RemoteSession(Server(url), None)
        answer = list(session.stream("x", options=GenerationOptions()))
        assert "".join(t.text for t in answer) == "<think>\nHm\n</think>\n\nYes"
        assert session.messages[-1]["content"] == "Yes"
        assert answer[-1].generation_tokens == 2


@pytest.mark.parametrize("thinking", [None, False, True])
def test_whether_to_think_is_sent_where_it_is_chosen(thinking: bool | None) -> None:
    asked: list[dict[str, object]] = []

    def answer(request: dict[str, object]) -> tuple[int, str]:
        asked.append(request)
        return 200, streamed(chunk("Yes"))

    with answering(answer) as url:
        options = GenerationOptions(thinking=thinking)
        list(RemoteSession(Server(url), None).stream("x", options=options))
    sent = asked[0].get("chat_template_kwargs")
    assert sent == (None if thinking is None else {"enable_thinking": thinking})


def test_of_another_server_nothing_is_claimed_that_it_does_not_say() -> None:
    """Neither the number of tokens, nor that the context is full; its reasoning is shown."""
    thought = {"choices": [{"index": 0, "delta": {"reasoning": "Hm"}}]}
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    with answering(lambda _: (200, streamed(thought, chunk("Yes"), end))) as url:
        model, server = connect(url, None, None)
        status, out, err = chatted(model, RemoteSession(server, None), "hello", "/show")
    assert (status, out) == (0, "<think>\nHm\n</think>\n\nYes\n")
    assert "max_tokens" in err
    assert "theirs" in err
    assert not any(word in err for word in ("0 tokens", "context", "unknown", "plainly"))
