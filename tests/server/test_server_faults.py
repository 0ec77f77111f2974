"""The faults of clients, networks and models that a server must survive, one test each."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

import httpx2 as httpx
import mlx.core as mx
import pytest
from serving import (
    CONTEXT,
    Held,
    figure,
    hold,
    host,
    ready,
    running,
    tiny_redrafter,
    wait_until_ready,
)
from starlette.testclient import TestClient
from waiting import DEADLINE, wait_for

from redrafter_mlx.engine.core import EngineStatus
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.options import EngineOptions
from redrafter_mlx.engine.scheduler import Scheduler
from redrafter_mlx.errors import BadInputError, DamagedFileError
from redrafter_mlx.server.admission import Gate
from redrafter_mlx.server.answers import sse
from redrafter_mlx.server.api_error import ApiError
from redrafter_mlx.server.app import create_app
from redrafter_mlx.server.hosting import ModelHost
from redrafter_mlx.server.models import Models
from redrafter_mlx.server.options import ServerOptions
from redrafter_mlx.server.tasks import ClientGoneError
from redrafter_mlx.structured import plan

CHAT = "/v1/chat/completions"
ASKED = {"messages": [{"role": "user", "content": "hello hello"}], "max_tokens": 400}


@pytest.fixture
def model() -> Redrafter:
    return tiny_redrafter()


@pytest.fixture
def api(model: Redrafter) -> Iterator[TestClient]:
    """A client of the application, without a socket."""
    with client(host(model)) as api:
        yield api


@contextlib.contextmanager
def client(host: ModelHost, **options: object) -> Iterator[TestClient]:
    app = create_app(Models([host]), ServerOptions(**options))  # type: ignore[arg-type]
    with TestClient(app, "http://127.0.0.1", raise_server_exceptions=False) as api:
        wait_for(lambda: api.get("/health").status_code == 200)
        yield api


def leave_after(lines: int) -> Callable[[Held, str, bool], None]:
    """Return a client that leaves after `lines` lines of a stream, or when its answer pauses."""

    def ask(held: Held, url: str, stream: bool) -> None:
        if not stream:
            with request(url, stream):
                wait_for(lambda: held.paused)
            return
        body = {**ASKED, "stream": True}
        with httpx.stream("POST", url + CHAT, json=body, timeout=DEADLINE) as answer:
            for number, _ in enumerate(answer.iter_lines(), 1):
                if number >= lines:
                    return

    return ask


def leave_at_once(held: Held, url: str, stream: bool) -> None:
    """Send a request and leave when its answer begins, before reading anything."""
    with request(url, stream):
        wait_for(lambda: held.begun == 1)


def request(url: str, stream: bool, asked: Mapping[str, object] = ASKED) -> socket.socket:
    """Send a request and return its connection, of which nothing is read."""
    body = json.dumps({**asked, "stream": stream}).encode()
    name, port = url.removeprefix("http://").split(":")
    head = f"POST {CHAT} HTTP/1.1\r\nHost: {name}\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = socket.create_connection((name, int(port)))
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize(
    ("tokens", "leave"),
    [(0, leave_after(1)), (3, leave_after(6)), (3, leave_at_once)],
    ids=["in prefill", "in decoding", "before reading"],
)
def test_work_ends_when_its_client_leaves(
    model: Redrafter, tokens: int, leave: Callable[[Held, str, bool], None], stream: bool
) -> None:
    held = hold(model, tokens)
    with ready(model) as url:
        leave(held, url, stream)
        wait_for(lambda: held.begun == held.ended == 1)
        wait_for(lambda: figure(url, "vllm:num_requests_running") == 0)
        if tokens and leave is not leave_at_once:
            wait_for(lambda: 'finished_reason="abort"' in httpx.get(f"{url}/metrics").text)
        held.let_go = True
        body = {**ASKED, "max_tokens": 2}  # the first answer compiles kernels
        assert httpx.post(url + CHAT, json=body, timeout=DEADLINE).status_code == 200


def wait_in_the_chat_template(
    monkeypatch: pytest.MonkeyPatch, go_on: threading.Event
) -> threading.Semaphore:
    """Let prompts with "long" wait in the template; each releases the semaphore when it begins."""
    begun, honest = threading.Semaphore(0), plan.render_chat

    def render(tokenizer: object, messages: list[dict[str, str]], **more: object) -> object:
        if messages[0]["content"] == "long":
            begun.release()
            go_on.wait(DEADLINE)
        return honest(tokenizer, messages, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(plan, "render_chat", render)
    return begun


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_client_that_leaves_while_its_prompt_is_tokenised_gives_its_place_to_others(
    model: Redrafter, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    go_on = threading.Event()
    begun = wait_in_the_chat_template(monkeypatch, go_on)
    long = {"messages": [{"role": "user", "content": "long"}]}
    with ready(model, max_concurrency=1, max_queue=1) as url:
        for _ in range(2):
            with request(url, stream, long):
                assert begun.acquire(timeout=DEADLINE)
            wait_for(lambda: figure(url, "vllm:num_requests_waiting") == 0)
        body = {**ASKED, "max_tokens": 2}
        assert httpx.post(url + CHAT, json=body, timeout=DEADLINE).status_code == 200
        go_on.set()


def test_a_full_queue_is_refused_and_empties(model: Redrafter) -> None:
    held = hold(model, 1)
    with ready(model, max_concurrency=1, max_queue=1) as url:
        statuses: list[int] = []

        def ask() -> None:
            answer = httpx.post(url + CHAT, json={**ASKED, "max_tokens": 3}, timeout=DEADLINE)
            statuses.append(answer.status_code)

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_for(lambda: figure(url, "vllm:num_requests_running") == 1)
        wait_for(lambda: figure(url, "vllm:num_requests_waiting") == 1)
        refused = httpx.post(url + CHAT, json=ASKED)
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) > 0
        assert refused.json()["error"]["code"] == "overloaded"
        held.let_go = True
        for thread in threads:
            thread.join(DEADLINE)
        assert statuses == [200, 200]
        assert figure(url, "vllm:num_requests_waiting") == 0
        assert httpx.post(url + CHAT, json={**ASKED, "n": 3}).status_code == 400


def test_an_answer_that_ended_gives_its_place_to_others() -> None:
    """While another answer of its request is still generated."""

    async def check() -> None:
        gate, go_on = Gate(1, 1), asyncio.Event()

        async def request() -> None:
            with gate.admitted(2) as turn:
                async with turn():
                    pass
                async with turn():
                    await go_on.wait()

        task = asyncio.ensure_future(request())
        await asyncio.sleep(0.01)
        assert (gate.running, gate.waiting) == (1, 0)
        with gate.admitted(1), pytest.raises(ApiError, match="queue is full"), gate.admitted(1):
            pass
        go_on.set()
        await task
        assert (gate.running, gate.waiting) == (0, 0)
        with gate.admitted(2):
            pass
        assert gate.waiting == 0

    asyncio.run(check())


def test_a_silent_stream_gets_empty_chunks(
    model: Redrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "HEARTBEAT_SECONDS", 0.05)
    held = hold(model, 0)
    with ready(model) as url:
        body = {**ASKED, "max_tokens": 2, "stream": True}
        with httpx.stream("POST", url + CHAT, json=body, timeout=DEADLINE) as answer:
            lines = (line for line in answer.iter_lines() if line)
            chunks = [json.loads(next(lines).removeprefix("data: ")) for _ in range(4)]
            assert [c["choices"][0]["delta"] for c in chunks[1:]] == [{}, {}, {}]
            held.let_go = True
            assert list(lines)[-1] == "data: [DONE]"


def test_a_client_that_reads_nothing_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "UNREAD_SECONDS", 0.05)

    async def full(message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def connected() -> dict[str, str]:
        await asyncio.Event().wait()
        return {}

    async def produce(emit: sse.Emit) -> None:
        await emit({"a": 1})

    framing = sse.Framing(named=False, end=None)
    stream = sse.EventStream(produce, framing, dict, lambda error: {"error": str(error)})
    with pytest.raises(ClientGoneError):
        asyncio.run(stream({}, connected, full))


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_of_100_mb_is_refused(model: Redrafter, announced: bool) -> None:
    pieces = [b" " * 10_000_000] * 10
    headers = {"Content-Length": "100000000"} if announced else {}
    with ready(model) as url:
        answer = httpx.post(url + CHAT, content=iter(pieces), headers=headers, timeout=DEADLINE)
        assert answer.status_code == 413
        assert "--max-body" in answer.json()["error"]["message"]
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe{}",
        b"[" * 100_000,
        b'{"messages":' * 5000,
        b'{"temperature":NaN,"messages":[{"role":"user","content":"a"}]}',
        b'{"temperature":1e999,"messages":[{"role":"user","content":"a"}]}',
        b'{"seed":-1' + b"0" * 30 + b',"messages":[{"role":"user","content":"a"}]}',
        b'{"max_tokens":1' + b"0" * 5000 + b',"messages":[{"role":"user","content":"a"}]}',
        b'{"max_tokens":-2,"messages":[{"role":"user","content":"a"}]}',
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        b"[]",
        b"null",
    ],
    ids=range(12),
)
def test_a_body_that_is_no_request_is_a_400(api: TestClient, body: bytes) -> None:
    for path in (CHAT, "/v1/completions"):
        answer = api.post(path, content=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{{ 1 / 0 }}"])
def test_a_chat_template_that_raises_is_a_400(
    model: Redrafter, api: TestClient, template: str
) -> None:
    model.tokenizer.chat_template = template
    answer = api.post(CHAT, json=ASKED)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"


def test_an_engine_that_fails_ends_its_requests_with_an_error_and_starts_anew(
    api: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the exception, with the line that raised it."""
    sound, rounds = Scheduler.work, 0

    def broken(scheduler: Scheduler, alone: bool) -> None:
        nonlocal rounds
        rounds += 1
        if rounds % 10 == 0:
            raise RuntimeError("[metal] failed")
        sound(scheduler, alone)

    monkeypatch.setattr(Scheduler, "work", broken)
    assert api.post(CHAT, json=ASKED).status_code == 500
    assert [r.exc_info[0] for r in caplog.records if r.exc_info] == [RuntimeError]
    stream = api.post(CHAT, json={**ASKED, "stream": True}).text.split("\n\n")
    error = json.loads(stream[-2].removeprefix("data: "))["error"]
    assert error["type"] == "server_error"
    assert "[metal] failed" in error["message"]
    assert api.post(CHAT, json={**ASKED, "max_tokens": 2}).status_code == 200
    assert "vllm:num_requests_running 0.0" in api.get("/metrics").text


def test_a_prompt_that_does_not_fit_into_memory_is_told_to_come_back() -> None:
    other = mx.zeros((10**8,), mx.uint8)  # another model's memory
    mx.eval(other)
    model = tiny_redrafter(engine=EngineOptions(memory_bytes=10**8))
    with client(host(model)) as api:
        answer = api.post(CHAT, json=ASKED)
        assert answer.status_code == 503
        assert int(answer.headers["Retry-After"]) > 0
        assert "GB" in answer.json()["error"]["message"]
    del other


def test_a_prompt_that_can_never_fit_into_memory_is_not_told_to_come_back() -> None:
    with client(host(tiny_redrafter(engine=EngineOptions(memory_bytes=1)))) as api:
        answer = api.post(CHAT, json=ASKED)
        assert answer.status_code == 400
        assert "Retry-After" not in answer.headers
        assert "GB" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("running", "seconds", "status"), [(1, 100.0, 503), (1, 0.0, 200), (0, 100.0, 200)]
)
def test_health_fails_when_work_waits_and_nothing_moves(
    api: TestClient, monkeypatch: pytest.MonkeyPatch, running: int, seconds: float, status: int
) -> None:
    moved = time.monotonic() - seconds
    monkeypatch.setattr(Redrafter, "status", EngineStatus(running, 0, moved))
    assert api.get("/health").status_code == status


def test_while_a_model_is_loaded_requests_are_told_to_come_back(model: Redrafter) -> None:
    loaded = threading.Event()

    def load() -> Redrafter:
        loaded.wait(DEADLINE)
        return model

    with running(ModelHost("tiny", load)) as url:
        for answer in (httpx.get(f"{url}/health"), httpx.post(url + CHAT, json=ASKED)):
            assert answer.status_code == 503
            assert int(answer.headers["Retry-After"]) > 0
        assert httpx.get(url).status_code == 200
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "tiny"
        loaded.set()
        wait_until_ready(url)


def test_a_model_that_could_not_be_loaded_is_unhealthy_until_a_request_loads_it() -> None:
    loads = 0

    def load() -> Redrafter:
        nonlocal loads
        loads += 1
        if loads < 3:
            raise DamagedFileError("the disk is gone")
        return tiny_redrafter()

    tried = ModelHost("tiny", load)
    with running(tried) as url:
        wait_for(lambda: not tried.starting)
        body = {**ASKED, "max_tokens": 2}
        assert httpx.get(f"{url}/health").status_code == 503
        failed = httpx.post(url + CHAT, json=body)
        assert failed.status_code == 500
        assert failed.json()["error"]["message"] == "the disk is gone"
        assert httpx.get(f"{url}/health").status_code == 503
        assert httpx.post(url + CHAT, json=body, timeout=DEADLINE).status_code == 200
        assert httpx.get(f"{url}/health").status_code == 200


def test_an_idle_model_is_unloaded_and_a_request_loads_it_again() -> None:
    loads: list[float] = []

    def load() -> Redrafter:
        loads.append(time.monotonic())
        if len(loads) == 2:
            raise DamagedFileError("the disk is gone")
        return tiny_redrafter()

    idle = ModelHost("tiny", load, unload_after=0.05)
    with client(idle) as api:
        for want in (500, 200):
            wait_for(lambda: idle.loaded is None)
            assert api.get("/health").status_code == 200
            assert api.get("/v1/models").json()["data"][0]["max_model_len"] == CONTEXT
            assert api.post(CHAT, json={**ASKED, "max_tokens": 2}).status_code == want
        assert len(loads) == 3


def test_the_time_to_the_first_token_counts_the_loading_of_the_model() -> None:
    loads: list[float] = []

    def load() -> Redrafter:
        time.sleep(0.5 * len(loads))
        loads.append(time.monotonic())
        return tiny_redrafter()

    idle = ModelHost("tiny", load, unload_after=0.05)
    with client(idle) as api:
        wait_for(lambda: idle.loaded is None)
        assert api.post(CHAT, json={**ASKED, "max_tokens": 1}).status_code == 200
        lines = api.get("/metrics").text.splitlines()
    assert len(loads) == 2
    (first,) = [line for line in lines if line.startswith("vllm:time_to_first_token_seconds_sum")]
    assert float(first.split()[-1]) >= 0.5


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:8080"}, 200),
        ({"Host": "[::1]:8080"}, 200),
        ({"Host": "host.docker.internal:8080"}, 200),
        ({"Host": "App.localhost"}, 200),
        ({"Host": "box.tail.example:443"}, 200),
        ({"Host": "localhost.:8080"}, 200),
        ({"Host": "[FD00::5]:8080"}, 200),
        ({"Host": "[fd00::6]:8080"}, 200),
        ({"Host": "0.0.0.0:8080"}, 200),
        ({"Host": "127.0.0.2"}, 200),
        ({"Host": "192.168.0.7:8080"}, 200),
        ({"Host": "192.168.0.7.evil.example"}, 403),
        ({"Host": "[evil.example]"}, 403),
        ({"Host": "internal"}, 403),
        ({"Host": "evil.internal.example"}, 403),
        ({"Host": "evilinternal"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Host": "localhost.evil.example"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": "http://127.0.0.1"}, 200),
        ({"Origin": "http://ui.example"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
def test_only_this_machine_and_pages_that_are_allowed_may_ask(
    model: Redrafter, headers: dict[str, str], status: int
) -> None:
    allowed = {"allow_host": ("Box.tail.example", "fd00::5"), "cors_origin": ("http://ui.example",)}
    with client(host(model), **allowed) as api:
        assert api.get("/v1/models", headers=headers).status_code == status


def test_a_probe_without_a_host_header_is_answered(model: Redrafter) -> None:
    """HTTP/1.0 needs none; browsers always send one."""
    with ready(model) as url:
        name, port = url.removeprefix("http://").split(":")
        with socket.create_connection((name, int(port))) as connection:
            connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            assert connection.recv(100).split()[1] == b"200"


def test_a_model_that_is_served_by_its_folder_is_found_by_its_name(model: Redrafter) -> None:
    name = "/Users/me/my models//qwen"
    with client(ModelHost(name, lambda: model)) as api:
        (listed,) = api.get("/v1/models").json()["data"]
        assert listed["id"] == name
        assert api.get(f"/v1/models/{quote(name, safe='')}").json() == listed
        assert api.get("/v1/models/Users/me").status_code == 404


@pytest.mark.parametrize(
    ("origin", "allowed", "answered"),
    [
        ("app://obsidian.md", "app://obsidian.md", "app://obsidian.md"),
        ("http://localhost:3000", "http://localhost:3000", "http://localhost:3000"),
        ("vscode-webview://1b2c", "*", "*"),
        ("http://evil.example", "app://obsidian.md", None),
    ],
)
def test_a_browser_may_ask_for_a_page_from_an_allowed_origin(
    model: Redrafter, origin: str, allowed: str, answered: str | None
) -> None:
    """Also if the page's network is public and this server's is not."""
    asked = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
        "Access-Control-Request-Private-Network": "true",
    }
    with client(host(model), cors_origin=(allowed,), api_key="k") as api:
        preflight = api.options(CHAT, headers=asked)
        assert preflight.headers.get("Access-Control-Allow-Origin") == answered
        assert preflight.status_code == (400 if answered is None else 200)
        if answered is not None:
            assert preflight.headers["Access-Control-Allow-Private-Network"] == "true"
            sent = {"Origin": origin, "Authorization": "Bearer k"}
            answer = api.get("/v1/models", headers=sent)
            assert answer.status_code == 200
            assert answer.headers["Access-Control-Allow-Origin"] == answered


@pytest.mark.parametrize("base", ["/v1", "", "//v1/", "/v1/"])
def test_paths_may_lack_the_prefix_or_double_a_slash(api: TestClient, base: str) -> None:
    body = {**ASKED, "max_tokens": 1}
    assert api.post(f"http://127.0.0.1{base}/chat/completions", json=body).status_code == 200
    body = {"prompt": "ab", "max_tokens": 1}
    assert api.post(f"http://127.0.0.1{base}/completions", json=body).status_code == 200
    assert api.get(f"http://127.0.0.1{base}/models").json()["data"][0]["id"] == "tiny"
    assert api.get(f"http://127.0.0.1{base}/models/tiny").json()["id"] == "tiny"


def test_a_path_without_the_prefix_needs_the_key_too(model: Redrafter) -> None:
    with client(host(model), api_key="k") as api:
        for path in ("/models", "//models", "//metrics", "/v1//models"):
            assert api.get(f"http://127.0.0.1{path}").status_code == 401


@pytest.mark.parametrize("path", ["/v1/responses/resp_1", "/responses/resp_1/cancel"])
def test_a_stored_response_is_a_404_that_says_what_there_is(api: TestClient, path: str) -> None:
    for answer in (api.get(path), api.post(path), api.delete(path)):
        assert answer.status_code == 404
        assert "stores no responses" in answer.json()["error"]["message"]


def test_the_answers_of_a_server_without_origins_name_no_origin(api: TestClient) -> None:
    answer = api.options(CHAT, headers={"Origin": "http://evil.example"})
    assert not any(name.startswith("access-control") for name in answer.headers)


def test_a_key_is_asked_for_where_something_is_done(model: Redrafter) -> None:
    with client(host(model), api_key="k") as api:
        assert {p: api.get(p).status_code for p in ("/", "/health", "/metrics", "/v1/models")} == {
            "/": 200, "/health": 200, "/metrics": 401, "/v1/models": 401,
        }  # fmt: skip
        for header, status in {
            "Bearer k": 200, "bearer k": 200, "BEARER k": 200, "Bearer kk": 401, "Bearer K": 401,
            "Bearer": 401, "Basic k": 401, "k": 401, "": 401,
        }.items():  # fmt: skip
            got = api.get("/v1/models", headers={"Authorization": header})
            assert got.status_code == status


@pytest.mark.parametrize(
    "wrong",
    [{"host": "0.0.0.0"}, {"host": "192.168.0.7"}, {"port": -1}, {"max_concurrency": 0},
     {"api_key": " "}, {"log_level": "loud"}, {"unload_after": 0},
     {"allow_host": ("box.lan:8443",)}, {"allow_host": ("[fd00::5]:80",)},
     {"allow_host": ("http://box.lan",)}, {"cors_origin": ("http://localhost:3000/",)},
     {"cors_origin": ("localhost:3000",)}, {"cors_origin": ("HTTP://Localhost:3000",)}],
)  # fmt: skip
def test_options_that_cannot_be_used_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(BadInputError, match=next(iter(wrong))):
        ServerOptions(**wrong)  # type: ignore[arg-type]


def test_what_a_request_asks_in_vain_is_logged(
    api: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "redrafter_mlx.server"):
        more = {
            "user": "me",
            "verbosity": "low",
            "chat_template_kwargs": {"thinking": True, "x": 1},
        }
        api.post(CHAT, json={**ASKED, "max_tokens": 1, **more})
    assert f"{CHAT}: ignored user, verbosity" in caplog.messages
