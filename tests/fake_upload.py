"""A Hub on this machine that takes uploads: what huggingface-hub asks of it, and nothing more.

Small files come inside the commit. Large ones come before it, by LFS (a batch of upload addresses,
a PUT each, a check) or by Xet (a token, then blocks and an index to a storage of its own).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml

TOKEN = "hf_good"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
USER = "me"


@dataclass
class FakeRepo:
    """A repository; `files` are those of its commits, large ones by their SHA-256."""

    private: bool
    files: dict[str, bytes | str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)


class FakeHub(ThreadingHTTPServer):
    """Accepts uploads of USER with TOKEN.

    stored:  what came by LFS, by its SHA-256
    xet:     what was asked of Xet's storage
    failing: status and reason that are answered instead, by a regular expression for paths
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, FakeRepo] = {}
        self.stored: dict[str, bytes] = {}
        self.xet: list[str] = []
        self.failing: dict[str, tuple[int, str]] = {}
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serving() -> Iterator[FakeHub]:
    server = FakeHub()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self._body()
        self.server.asked.append(f"{self.command} {path}")
        for pattern, (status, reason) in self.server.failing.items():
            if re.fullmatch(pattern, path):
                return self._send(status, {"error": reason})
        if path.startswith(("/storage/", "/cas/")):
            return self._storage(path, body)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            reason = "Invalid credentials in Authorization header"
            return self._send(401, {"error": reason}, {"X-Error-Message": reason})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return self._validate(json.loads(body)["content"])
        return self._repo(path, body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _create(self, asked: dict[str, object]) -> None:
        name = f"{asked['organization'] or USER}/{asked['name']}"
        url = f"{self.server.url}/{name}"
        if name in self.server.repos:
            return self._send(409, {"error": "You already created this model repo", "url": url})
        if not name.startswith(f"{USER}/"):
            reason = "You don't have the rights to create a model under this namespace"
            return self._send(403, {"error": reason}, {"X-Error-Message": reason})
        private = asked.get("private") is True or asked.get("visibility") == "private"
        self.server.repos[name] = FakeRepo(private)
        return self._send(200, {"url": url, "name": name})

    def _validate(self, content: str) -> None:
        """As the Hub: front matter that is there has to be a mapping with a known licence."""
        if not content.startswith("---\n"):
            warning = {"message": "empty or missing yaml metadata in repo card"}
            return self._send(200, {"errors": [], "warnings": [warning]})
        try:
            fields = yaml.safe_load(content.split("---\n", 2)[1])
            fine = isinstance(fields, dict) and fields.get("license") in ("apache-2.0", "other")
        except yaml.YAMLError:
            fine = False
        errors = [] if fine else [{"message": '"license" must be one of [...]'}]
        return self._send(200 if fine else 400, {"errors": errors, "warnings": []})

    def _repo(self, path: str, body: bytes) -> None:
        found = re.fullmatch(
            r"/(?:api/models/)?([\w.-]+/[\w.-]+?)(?:\.git)?(|/preupload/main|/commit/main"
            r"|/info/lfs/objects/batch|/xet-write-token/main|/revision/main)", path
        )  # fmt: skip
        repo = self.server.repos.get(found[1]) if found else None
        if found is None or repo is None:
            return self._send(
                404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
            )
        if found[2] in ("", "/revision/main"):
            siblings = [{"rfilename": name} for name in repo.files]
            said = {"id": found[1], "private": repo.private, "sha": COMMIT, "siblings": siblings}
            return self._send(200, said)
        if not found[1].startswith(f"{USER}/"):
            reason = "Forbidden: you don't have write access"
            return self._send(403, {"error": reason}, {"X-Error-Message": reason})
        if found[2] == "/preupload/main":
            return self._send(200, {"files": [_mode(f) for f in json.loads(body)["files"]]})
        if found[2] == "/xet-write-token/main":
            headers = {
                "X-Xet-Cas-Url": f"{self.server.url}/cas",
                "X-Xet-Access-Token": "xet",
                "X-Xet-Token-Expiration": "99999999999",
            }
            said = {"casUrl": headers["X-Xet-Cas-Url"], "accessToken": "xet", "exp": 99999999999}
            return self._send(200, said, headers)
        if found[2] == "/info/lfs/objects/batch":
            objects = json.loads(body)["objects"]
            return self._send(
                200, {"transfer": "basic", "objects": [self._lfs(o) for o in objects]}
            )
        return self._commit(found[1], repo, body)

    def _lfs(self, wanted: dict[str, object]) -> dict[str, object]:
        if wanted["oid"] in self.server.stored:
            return wanted
        actions = {
            "upload": {"href": f"{self.server.url}/storage/{wanted['oid']}"},
            "verify": {"href": f"{self.server.url}/storage/verify"},
        }
        return {**wanted, "actions": actions}

    def _storage(self, path: str, body: bytes) -> None:
        if path.startswith("/cas/"):
            self.server.xet.append(f"{self.command} {path}")
            known = re.fullmatch(r"/cas/v1/(xorbs|shards).*", path) is not None
            if self.command != "POST" or not known:  # no chunk is here, and no newer protocol
                return self._send(404, {"error": "unknown"})
            return self._send(200, {"was_inserted": True, "result": 1})
        if path == "/storage/verify":
            asked = json.loads(body)
            whole = len(self.server.stored.get(asked["oid"], b"")) == asked["size"]
            return self._send(200 if whole else 404, {})
        self.server.stored[hashlib.sha256(body).hexdigest()] = body
        return self._send(200, {})

    def _commit(self, name: str, repo: FakeRepo, body: bytes) -> None:
        lines = [json.loads(line) for line in body.splitlines()]
        assert lines[0]["key"] == "header"
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                repo.files[value["path"]] = base64.b64decode(value["content"])
            else:
                assert line["key"] == "lfsFile"
                repo.files[value["path"]] = value["oid"]
        repo.messages.append(lines[0]["value"]["summary"])
        said = {"commitUrl": f"{self.server.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT}
        return self._send(200, said)

    def _send(
        self, status: int, said: dict[str, object], headers: dict[str, str] | None = None
    ) -> None:
        content = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _mode(asked: dict[str, object]) -> dict[str, object]:
    large = str(asked["path"]).endswith((".safetensors", ".png"))
    return {"path": asked["path"], "uploadMode": "lfs" if large else "regular",
            "shouldIgnore": False}  # fmt: skip
