"""Clients of servers for OpenAI's API: proxies of the environment, and whose key they send."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from redrafter_mlx.bench.measure.load_client import Server
from redrafter_mlx.cli import main
from redrafter_mlx.errors import RedrafterError

MODELS = b'{"data": [{"id": "theirs"}]}'


@contextmanager
def listening() -> Iterator[tuple[str, list[tuple[str, dict[str, str]]]]]:
    """Run a server, or a proxy; yields its address and what it was asked: targets and headers."""
    asked: list[tuple[str, dict[str, str]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, dict(self.headers)))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(MODELS)

        def do_POST(self) -> None:
            asked.append((self.path, dict(self.headers)))
            self.send_error(503, "enough")

        def do_CONNECT(self) -> None:
            asked.append((self.path, dict(self.headers)))
            self.send_error(403, "no tunnel")

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def test_a_server_elsewhere_is_asked_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as (proxy, asked):
        monkeypatch.setenv("http_proxy", f"http://me:p%40ss@{proxy}")
        monkeypatch.setenv("https_proxy", proxy)
        assert Server("http://elsewhere.invalid:81/v1/").models() == [{"id": "theirs"}]
        with pytest.raises(RedrafterError, match="no tunnel"):
            Server("https://elsewhere.invalid/v1").models()
    (target, headers), (tunnel, _) = asked
    assert target == "http://elsewhere.invalid:81/v1/models"
    assert headers["Host"] == "elsewhere.invalid:81"
    assert headers["Proxy-Authorization"] == "Basic bWU6cEBzcw=="
    assert tunnel == "elsewhere.invalid:443"


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_this_machine_is_never_asked_through_a_proxy(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listening() as (proxy, passed), listening() as (here, asked):
        monkeypatch.setenv("http_proxy", f"http://{proxy}")
        assert Server(f"http://{name}:{here.split(':')[1]}/v1").models()
    assert not passed
    assert [target for target, _ in asked] == ["/v1/models"]


def test_a_server_in_no_proxy_is_asked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as (proxy, asked):
        monkeypatch.setenv("http_proxy", f"http://{proxy}")
        monkeypatch.setenv("no_proxy", "other.example,elsewhere.invalid")
        with pytest.raises(RedrafterError, match="cannot be asked"):
            Server("http://elsewhere.invalid/v1").models()
    assert not asked


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:9", "http://127.0.0.1:x", "http://"])
def test_a_proxy_that_cannot_be_used_is_named(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", proxy)
    with pytest.raises(RedrafterError, match="http_proxy"):
        Server("http://elsewhere.invalid/v1").models()


def test_a_proxy_that_does_not_listen_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "127.0.0.1:9")
    with pytest.raises(RedrafterError, match=r"no proxy listens at 127\.0\.0\.1:9"):
        Server("http://elsewhere.invalid/v1").models()


@pytest.mark.parametrize(
    ("variable", "sent"), [("OPENAI_API_KEY", None), ("REDRAFTER_API_KEY", "Bearer secret")]
)
def test_a_server_under_load_gets_no_key_of_another_service(
    variable: str, sent: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REDRAFTER_API_KEY", raising=False)
    monkeypatch.setenv(variable, "secret")
    with listening() as (server, asked):
        assert main.run(["bench", "serve", "--url", f"http://{server}/v1", "--users", "1"]) == 1
    assert [headers.get("Authorization") for _, headers in asked] == [sent]
