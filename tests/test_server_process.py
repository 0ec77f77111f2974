"""`redrafter-mlx serve` as a process: how it starts, and how it ends."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

httpx = pytest.importorskip("httpx2")
pytest.importorskip("starlette", reason="needs the extra `serve`")

from serving import DEADLINE, wait_until_ready  # noqa: E402

from redrafter_mlx.cli.main import run  # noqa: E402

ASKED = {"prompt": "hello hello", "max_tokens": 40, "stream": True}


@contextlib.contextmanager
def served(
    port: int = 0, stops_after: int = 0, seconds: float = 3600
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield a process that serves the tiny model, and its URL.

    After `stops_after` tokens, answers pause for `seconds` at each token.
    """
    script = [sys.executable, str(Path(__file__).with_name("serving.py"))]
    with subprocess.Popen(
        [*script, str(port), str(stops_after), str(seconds)], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        try:
            found = re.search(r"http://[\d.:]+", line)
            assert found is not None, line + process.stderr.read()
            wait_until_ready(found[0])
            yield process, found[0]
        finally:
            process.kill()


def test_after_kill_9_the_same_port_serves_the_same_answer() -> None:
    answers = []
    port = 0
    for _ in range(2):
        with served(port) as (process, url):
            port = int(url.rsplit(":", 1)[1])
            whole = httpx.post(f"{url}/v1/completions", json={**ASKED, "stream": False})
            answers.append(whole.json()["choices"])
            with httpx.stream("POST", f"{url}/v1/completions", json=ASKED) as stream:
                lines = stream.iter_lines()
                next(lines)
                process.kill()
                with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
                    list(lines)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("signal_", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_what_runs(signal_: signal.Signals) -> None:
    with served(stops_after=5) as (process, url):
        with httpx.stream("POST", f"{url}/v1/completions", json=ASKED, timeout=DEADLINE) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal_)
            with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
                list(lines)
        assert process.wait(DEADLINE) in (130, -signal_)


def test_ctrl_c_ends_a_long_answer_with_an_error_that_its_client_reads() -> None:
    """Within five seconds, and without a traceback."""
    with served(stops_after=5, seconds=0.3) as (process, url):
        with httpx.stream("POST", f"{url}/v1/completions", json=ASKED, timeout=DEADLINE) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            began = time.monotonic()
            events = [line.removeprefix("data: ") for line in lines if line]
        assert process.wait(DEADLINE) == 130
        assert time.monotonic() - began < 5
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    error = json.loads(events[-1])["error"]
    assert error["type"] == "server_error"
    assert "ending" in error["message"]


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
