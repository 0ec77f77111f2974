"""A client that puts a server for OpenAI's API under load, and sees what its users would see.

Each of N users asks a question, reads the answer as it streams, and asks the next one at once. Any
server can be measured, so that two of them are measured by the same client.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

from redrafter_mlx.errors import BadInputError, ServerError

_CONNECTIONS = {"http": HTTPConnection, "https": HTTPSConnection}

_PATIENCE = 600.0
"""Seconds without a byte after which a server counts as gone."""


@dataclass(frozen=True)
class Server:
    """A server for OpenAI's API.

    url:   with the path before `/chat/completions`, such as http://127.0.0.1:8080/v1
    model: as the server names it; None leaves the choice to it
    """

    url: str
    model: str | None = None
    api_key: str | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in _CONNECTIONS or not parts.hostname:
            raise BadInputError(f"--url is {self.url!r}; give one like http://127.0.0.1:8080/v1")

    def stream(self, body: Mapping[str, object]) -> Iterator[dict[str, object]]:
        """The chunks of one streamed chat completion.

        Raises ServerError, naming the server, if it is out of reach, refuses, or breaks off.
        """
        parts = urlsplit(self.url)
        connection = _CONNECTIONS[parts.scheme](parts.netloc, timeout=_PATIENCE)
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        named = {} if self.model is None else {"model": self.model}
        sent = json.dumps({**named, **body, "stream": True})
        try:
            connection.request("POST", f"{parts.path.rstrip('/')}/chat/completions", sent, headers)
            response = connection.getresponse()
            if response.status != 200:
                said = " ".join(response.read(2000).decode(errors="replace").split())
                raise ServerError(f"{self.url} answered {response.status}: {said:.200}")
            for line in response:
                content = line.strip().removeprefix(b"data:").strip()
                if content == b"[DONE]":
                    return
                if line.startswith(b"data:"):
                    yield json.loads(content)
            raise ServerError(f"{self.url} broke an answer off")
        except (OSError, HTTPException, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise ServerError(f"{self.url} cannot be asked: {reason}") from None
        finally:
            connection.close()


@dataclass(frozen=True)
class Answered:
    """One answer as its user saw it; times are of one clock.

    tokens: as the server counts them
    """

    text: str
    tokens: int
    began: float
    first_token: float
    ended: float


@dataclass(frozen=True)
class Load:
    """What users ask, how many at once.

    questions: each of them is asked once
    """

    questions: Sequence[str]
    users: int
    max_tokens: int


def ask(server: Server, question: str, max_tokens: int) -> Answered:
    """One greedy answer; raises ServerError also for one without the usage that was asked for."""
    began, first = time.perf_counter(), None
    text, tokens = "", None
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }
    for chunk in server.stream(body):
        if chunk.get("usage"):
            tokens = chunk["usage"]["completion_tokens"]  # type: ignore[index]
        for choice in chunk.get("choices") or ():  # type: ignore[attr-defined]
            piece = choice["delta"].get("content") or ""
            if piece and first is None:
                first = time.perf_counter()
            text += piece
    if not isinstance(tokens, int):
        raise ServerError(f"{server.url} does not count its tokens in `usage`")
    ended = time.perf_counter()
    return Answered(text, tokens, began, ended if first is None else first, ended)


def measure_load(server: Server, load: Load) -> list[Answered]:
    """The answers to all questions, in their order, as users come free.

    The first error ends the load when the answers that run have ended, and is raised.
    """
    waiting, failed = iter(enumerate(load.questions)), threading.Event()
    lock = threading.Lock()
    answers: dict[int, Answered] = {}

    def user() -> None:
        while not failed.is_set():
            with lock:
                number, question = next(waiting, (-1, ""))
            if number < 0:
                return
            try:
                answers[number] = ask(server, question, load.max_tokens)
            except BaseException:
                failed.set()
                raise

    with ThreadPoolExecutor(load.users) as pool:
        for future in [pool.submit(user) for _ in range(load.users)]:
            future.result()
    return [answers[number] for number in sorted(answers)]
