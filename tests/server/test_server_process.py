"""`redrafter-mlx serve` as a process: how it starts, and how it ends."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from places import SUPPORT
from serving import figure, tiny_redrafter, wait_until_ready
from waiting import DEADLINE, wait_for
from weights_samples import gguf_metadata, gguf_tensors, llama_model, write_gguf

from redrafter_mlx.cli import serve
from redrafter_mlx.cli.main import run
from redrafter_mlx.cli.terminal import one_line
from redrafter_mlx.server import process as process_of_server
from redrafter_mlx.server.process import log_formatter

ASKED = {"prompt": "hello hello", "max_tokens": 40, "stream": True}


@contextlib.contextmanager
def served(
    port: int = 0, after: int = 0, let_go: Path = Path("never"), finish: float = 3
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield a process that serves the tiny model, and its URL.

    After `after` tokens answers pause until the file `let_go` exists; Ctrl-C lets them finish for
    `finish` seconds.
    """
    script = [sys.executable, str(SUPPORT / "servers" / "serving.py")]
    with opened([*script, str(port), str(after), str(let_go), str(finish)]) as found:
        yield found


@contextlib.contextmanager
def command(*arguments: str, home: Path) -> Iterator[str]:
    """Run a command that serves at a free port, with a home folder; yields the server's URL."""
    own = {"HOME": home, "HF_HOME": home / "hub", "REDRAFTER_CACHE": home / "cache"}
    environment = {**os.environ, **{name: str(path) for name, path in own.items()}}
    line = [sys.executable, "-m", "redrafter_mlx.cli.main", *arguments, "--port", "0"]
    with opened(line, environment) as (_, url):
        yield url


@contextlib.contextmanager
def opened(
    line: list[str], environment: dict[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield a process that serves, and its URL, once its model is in memory."""
    pipe = subprocess.PIPE
    with subprocess.Popen(line, stderr=pipe, text=True, env=environment) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        try:
            found = re.search(r"http://[\d.:]+", line)
            assert found is not None, line + process.stderr.read()
            wait_until_ready(found[0])
            yield process, found[0]
        finally:
            process.kill()


def test_models_of_other_apps_are_loaded_when_a_request_names_them(tmp_path: Path) -> None:
    """Any other file of this machine is none that a request may name."""
    parts = gguf_metadata(), gguf_tensors(llama_model())
    named = write_gguf(tmp_path / "named.gguf", *parts)
    folder = tmp_path / "home" / ".lmstudio" / "models" / "org" / "repo"
    folder.mkdir(parents=True)
    write_gguf(folder / "tiny.gguf", *parts)
    write_gguf(tmp_path / "other.gguf", *parts)
    with command("serve", str(named), "--load-on-demand", home=tmp_path / "home") as url:
        models = httpx.get(f"{url}/v1/models", timeout=DEADLINE).json()["data"]
        states = {entry["id"]: entry["x_redrafter"]["state"] for entry in models}
        assert states == {str(named): "loaded", "org/repo/tiny.gguf": "available"}
        texts = []
        for name, status in (
            (str(named), 200), ("org/repo/tiny.gguf", 200), (str(tmp_path / "other.gguf"), 404),
            ("smollm2-135m", 404),
        ):  # fmt: skip
            asked = {"model": name, "prompt": "hello", "max_tokens": 8}
            answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=DEADLINE)
            assert answer.status_code == status, answer.text
            texts += [answer.json()["choices"][0]["text"]] if status == 200 else []
        assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], ["smollm2-135m"]),
        (["a"], ["a"]),
        (["--model", "a"], ["a"]),
        (["a", "b", "c"], ["a", "b", "c"]),
    ],
)
def test_several_models_may_be_named(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], names: list[str]
) -> None:
    served = list[str]()
    monkeypatch.setattr(serve, "run", lambda _, __, names: served.extend(names))
    assert run(["serve", *arguments, "--offline"]) == 0
    assert served == names


@pytest.mark.parametrize("arguments", [["a", "b", "a"], ["a", "b", "--model", "c"]])
def test_models_that_are_named_twice_or_in_two_ways_are_an_error_in_one_line(
    capfd: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert run(["serve", *arguments]) == 1
    assert re.fullmatch(r"error: .*'a'.*\n", capfd.readouterr().err)


def test_after_kill_9_the_same_port_serves_the_same_answer() -> None:
    answers = []
    port = 0
    for _ in range(2):
        with served(port) as (process, url):
            port = int(url.rsplit(":", 1)[1])
            asked = {**ASKED, "stream": False}
            whole = httpx.post(f"{url}/v1/completions", json=asked, timeout=DEADLINE)
            answers.append(whole.json()["choices"])
            with httpx.stream("POST", f"{url}/v1/completions", json=ASKED) as stream:
                lines = stream.iter_lines()
                next(lines)
                process.kill()
                with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
                    list(lines)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("signal_", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)]
)
def test_a_signal_ends_what_runs(signal_: signal.Signals, status: int) -> None:
    with served(after=5) as (process, url):
        with httpx.stream("POST", f"{url}/v1/completions", json=ASKED, timeout=DEADLINE) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal_)
            with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
                list(lines)
        assert process.wait(DEADLINE) == status


def events_of(stream: httpx.Response) -> Iterator[str]:
    return (line.removeprefix("data: ") for line in stream.iter_lines() if line)


def test_ctrl_c_ends_a_long_answer_with_an_error_that_its_client_reads() -> None:
    """Without a traceback."""
    with served(after=5, finish=0) as (process, url):
        with httpx.stream("POST", f"{url}/v1/completions", json=ASKED, timeout=DEADLINE) as stream:
            events = events_of(stream)
            next(events)
            process.send_signal(signal.SIGINT)
            *_, last = events
        assert process.wait(DEADLINE) == 130
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    error = json.loads(last)["error"]
    assert error["type"] == "server_error"
    assert "ending" in error["message"]


def test_ctrl_c_does_not_wait_for_a_long_prompt_to_be_tokenised() -> None:
    # Only a user's text is refused by its bytes: a template may cut other messages.
    messages = [
        {"role": "system", "content": "hello world <x> " * 250_000},
        {"role": "user", "content": "Hello"},
    ]
    long = {"messages": messages}
    answers: list[httpx.Response] = []
    with served(finish=0) as (process, url):

        def ask() -> None:
            answers.append(httpx.post(f"{url}/v1/chat/completions", json=long, timeout=DEADLINE))

        asking = threading.Thread(target=ask)
        asking.start()
        wait_for(lambda: figure(url, "vllm:num_requests_waiting") == 1)
        process.send_signal(signal.SIGINT)
        asking.join(DEADLINE)
        assert process.wait(DEADLINE) == 130
    assert "ending" in answers[0].json()["error"]["message"]


def test_ctrl_c_lets_an_answer_finish_that_needs_little_time(tmp_path: Path) -> None:
    let_go = tmp_path / "let_go"
    want = tiny_redrafter().generate(ASKED["prompt"], raw=True, max_tokens=ASKED["max_tokens"])
    with served(after=5, let_go=let_go, finish=DEADLINE) as (process, url):
        with httpx.stream("POST", f"{url}/v1/completions", json=ASKED, timeout=DEADLINE) as stream:
            events = events_of(stream)
            got = [next(events)]
            process.send_signal(signal.SIGINT)
            wait_for(lambda: not listens(url))
            let_go.touch()
            got += events
        assert process.wait(DEADLINE) == 130
    assert got.pop() == "[DONE]"
    choices = [choice for event in got for choice in json.loads(event)["choices"]]
    assert "".join(choice["text"] for choice in choices) == want.text
    assert choices[-1]["finish_reason"] == want.finish_reason


def test_answers_may_finish_for_three_seconds() -> None:
    """And their clients can read of the end in a fourth, as docs/guides/server.md says."""
    assert (process_of_server.FINISH_SECONDS, process_of_server.END_SECONDS) == (3, 1)


def listens(url: str) -> bool:
    """Whether a server accepts connections."""
    try:
        socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))).close()
    except ConnectionRefusedError:
        return False
    return True


def test_a_port_that_is_taken_is_an_error_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert run(["serve", "--port", str(taken.getsockname()[1])]) == 1
    assert re.fullmatch(
        r"error: cannot listen on 127\.0\.0\.1:\d+: .*--port\n", capfd.readouterr().err
    )


def test_without_the_extra_it_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert run(["serve"]) == 1
    assert "pip install 'redrafter-mlx[serve]'" in capfd.readouterr().err


def test_a_log_line_stays_one_line_and_controls_no_terminal() -> None:
    said = "x\n\x1b[32mINFO\x1b[0m: forged\x1b[2J"
    record = logging.LogRecord("redrafter_mlx", logging.INFO, "", 0, "ignored %s", (said,), None)
    shown = log_formatter(one_line).format(record)
    assert "\n" not in shown
    assert "\x1b[2J" not in shown
    assert "forged" in shown


def test_a_model_that_cannot_be_loaded_ends_the_server(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", str(tmp_path / "none"), "--port", "0", "--offline"]) == 1
    assert capfd.readouterr().err.splitlines()[-1].startswith("error: ")


def test_beyond_this_machine_a_key_is_needed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", "--host", "0.0.0.0"]) == 1
    assert "--api-key" in capfd.readouterr().err
    monkeypatch.setenv("REDRAFTER_API_KEY", "k")
    monkeypatch.setitem(sys.modules, "uvicorn", None)  # the command gets as far as this import
    assert run(["serve", "--host", "0.0.0.0"]) == 1
    assert "redrafter-mlx[serve]" in capfd.readouterr().err
