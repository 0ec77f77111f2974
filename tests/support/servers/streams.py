"""A server's streamed answers, chunk by chunk."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def chunk(text: str | None) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": {} if text is None else {"content": text}}]}


def streamed(*chunks: dict[str, object], end: bool = True) -> str:
    lines = [": a comment\n\n", *(f"data: {json.dumps(c)}\n\n" for c in chunks)]
    return "".join(lines) + ("data: [DONE]\n\n" if end else "")


@contextmanager
def answering(answer: Callable[[dict[str, object]], tuple[int, str]]) -> Iterator[str]:
    """Run a server that answers each request's body with a status and a text."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/v1/models"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "theirs"}]}')

        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions"
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, text = answer(body)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
