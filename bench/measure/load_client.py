"""Load client: measures a server for OpenAI's API as its users see it.

Each of N users asks a question, reads the answer as it streams, and then asks the next question
immediately. It works with any server, so that two servers are measured by the same client.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPException, HTTPResponse
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from redrafter_mlx.bench.measure.http_proxy import CONNECTIONS, connection_to, proxy_of
from redrafter_mlx.errors import BadInputError, ServerError

_TEXTS = ("content", "reasoning_content", "reasoning")
"""Names of the text in a chunk: an answer's, and reasoning's on different servers."""

_ROUND = 4  # questions for each user that a server answers before it is another server's turn

_TO_CONNECT, _PATIENCE = 10.0, 600.0
"""Timeouts in seconds: to connect, and without a byte from a connected server."""


@dataclass(frozen=True)
class Server:
    """A server for OpenAI's API."""

    url: str  # including the path before `/chat/completions`, such as http://127.0.0.1:8080/v1
    model: str | None = None  # the server's name for it; None lets the server choose
    api_key: str | None = None

    def __post_init__(self) -> None:
        if "@" in self.url:  # a password may be part of it, so it is not repeated
            raise BadInputError("the URL names a user; give the server's key by --api-key")
        if not _is_url(self.url):
            raise BadInputError(
                f"{self.url!r} is no server's URL; give one like http://127.0.0.1:8080/v1"
            )
        key = self.api_key
        if key is not None and not _is_sendable(key):
            raise BadInputError(
                "--api-key has a character that is not printable ASCII, such as a line end; "
                "no request can carry it"
            )

    def models(self) -> list[dict[str, object]]:
        """Return the models that the server lists; raises ServerError as `stream` does."""
        with self._response("GET", "models") as response:
            return [{**entry, "id": str(entry["id"])} for entry in json.load(response)["data"]]

    def stream(self, body: Mapping[str, object]) -> Generator[dict[str, object], None, None]:
        """Yield the chunks of one streamed chat completion.

        Raises ServerError, naming the server, if it is out of reach, refuses, or breaks off.
        """
        named = {} if self.model is None else {"model": self.model}
        sent = json.dumps({**named, **body, "stream": True})
        with self._response("POST", "chat/completions", sent) as response:
            for line in response:
                content = line.strip().removeprefix(b"data:").strip()
                if content == b"[DONE]":
                    return
                if line.startswith(b"data:"):
                    chunk: dict[str, object] = {**json.loads(content)}
                    if "error" in chunk:
                        raise ServerError(f"{self.url} broke an answer off: {_words(content)}")
                    yield chunk
            raise ServerError(f"{self.url} broke an answer off")

    @contextmanager
    def _response(self, method: str, path: str, body: str | None = None) -> Iterator[HTTPResponse]:
        """Open a response with status 200; any failure until it is read is a ServerError."""
        connection, target, on_the_way = connection_to(
            f"{self.url.rstrip('/')}/{path}", _TO_CONNECT
        )
        headers = {"Content-Type": "application/json", **on_the_way}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            connection.connect()
            connection.sock.settimeout(_PATIENCE)
            connection.request(method, target, body, headers)
            response = connection.getresponse()
            if response.status != 200:
                words = f"{_words(response.read(2000)):.200}"
                hint = "; give its key by --api-key" if response.status == 401 else ""
                raise ServerError(f"{self.url} answered {response.status}: {words}{hint}")
            yield response
        except ConnectionRefusedError:
            if proxy := proxy_of(self.url):
                raise ServerError(
                    f"no proxy listens at {proxy.hostname}:{proxy.port}, which the environment "
                    f"names for {self.url}; unset it, or add the server to no_proxy"
                ) from None
            raise ServerError(
                f"no server listens at {self.url}; start one with `redrafter-mlx serve`"
            ) from None
        except (OSError, HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise ServerError(f"{self.url} cannot be asked: {reason}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise ServerError(f"{self.url} did not answer as OpenAI's API does: {error}") from error
        finally:
            connection.close()


def _is_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        CONNECTIONS[parts.scheme](parts.netloc)  # checks it, and connects later
        host, port = (parts.hostname or "").encode("idna"), parts.port
    except (LookupError, ValueError, HTTPException):  # a port that is no number, a space, ...
        return False
    return bool(host) and port != 0 and " " not in parts.path and _is_sendable(parts.path)


def _is_sendable(text: str) -> bool:
    """Whether a line of a request can carry a text."""
    return text.isascii() and text.isprintable()


def _words(body: bytes) -> str:
    """Return the message of OpenAI's error object, else the whole text, on one line."""
    try:
        said = json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        said = body.decode(errors="replace")
    return " ".join(str(said).split())


@dataclass(frozen=True)
class Answered:
    """One answer as its user saw it; all times are from one clock."""

    text: str
    tokens: int  # the server's count
    began: float
    first_token: float
    ended: float


@dataclass(frozen=True)
class Load:
    """The questions, each asked once, and the number of users who ask at the same time."""

    questions: Sequence[str]
    users: int
    max_tokens: int
    temperature: float = 0.0

    def rounds(self) -> list[Load]:
        """Return parts of about equal size, with at least _ROUND questions for each user."""
        n = len(self.questions)
        count = max(n // (_ROUND * self.users), 1)
        bounds = pairwise(n * i // count for i in range(count + 1))
        return [replace(self, questions=self.questions[a:b]) for a, b in bounds]


def ask(server: Server, question: str, max_tokens: int, temperature: float = 0.0) -> Answered:
    """Ask for one answer; a reply without token usage is a ServerError, too."""
    began, first = time.perf_counter(), None
    text, tokens = "", None
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream_options": {"include_usage": True},
    }
    for chunk in server.stream(body):
        try:
            counted, piece = _read_chunk(chunk)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ServerError(
                f"{server.url} streams otherwise than OpenAI's API: {error}"
            ) from error
        tokens = tokens if counted is None else counted
        if piece and first is None:
            first = time.perf_counter()
        text += piece
    if not isinstance(tokens, int):
        raise ServerError(f"{server.url} does not count its tokens in `usage`")
    ended = time.perf_counter()
    return Answered(text, tokens, began, ended if first is None else first, ended)


def _read_chunk(chunk: Mapping[str, Any]) -> tuple[object, str]:
    """Return the number of tokens so far, None if it is not in the chunk, and the new text."""
    text = ""
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        text += next(filter(None, (delta.get(name) for name in _TEXTS)), "")
    return (chunk.get("usage") or {}).get("completion_tokens"), text


def measure_load(server: Server, load: Load) -> list[Answered]:
    """Return the answers in the order of the questions; each free user asks the next question.

    After an error or Ctrl-C no more are asked; it is raised when the running answers have ended.
    """
    with ThreadPoolExecutor(load.users) as pool:
        limits = load.max_tokens, load.temperature
        asked = [pool.submit(ask, server, text, *limits) for text in load.questions]
        try:
            wait(asked, return_when=FIRST_EXCEPTION)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return [answer.result() for answer in asked]


def measure_in_turn(servers: Sequence[Server], load: Load) -> list[list[list[Answered]]]:
    """Measure servers round by round, so that a slower minute is all of theirs."""
    measured: list[list[list[Answered]]] = [[] for _ in servers]
    for i, part in enumerate(load.rounds() if len(servers) > 1 else [load]):
        for turn in range(i, i + len(servers)):
            at = turn % len(servers)
            measured[at].append(measure_load(servers[at], part))
    return measured
