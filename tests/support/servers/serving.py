"""A server for tests: a tiny random model on a free local port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx2 as httpx
import uvicorn
from tiny import byte_model, byte_tokenizer
from waiting import DEADLINE, wait_for

from redrafter_mlx.cli import main as cli
from redrafter_mlx.cli import options as opt
from redrafter_mlx.config import GenerationOptions
from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.options import EngineOptions
from redrafter_mlx.engine.request import Request
from redrafter_mlx.response import Response
from redrafter_mlx.server import process
from redrafter_mlx.server.app import create_app
from redrafter_mlx.server.hosting import ModelHost
from redrafter_mlx.server.models import Models
from redrafter_mlx.server.options import ServerOptions

CONTEXT = 2048
KEY = "secret"
ASKED = [{"role": "user", "content": "hello hello hello"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
"""Schema of a tool's arguments."""


class AlwaysDrafting(Redrafter):
    """A redrafter that drafts in every possible step, independent of measured times."""

    def chosen_options(
        self, options: GenerationOptions | None, overrides: Mapping[str, object]
    ) -> GenerationOptions:
        return super().chosen_options(options, {**overrides, "beam_width": 1, "beam_length": 5})


def tiny_redrafter(seed: int = 0, engine: EngineOptions | None = None) -> Redrafter:
    """Return a model whose tokens are bytes, with prompt lookup."""
    model = byte_model(seed, max_position_embeddings=CONTEXT)
    return AlwaysDrafting(model, byte_tokenizer(), host_drafters=(Lookup(),), engine=engine)


def host(model: Redrafter) -> ModelHost:
    return ModelHost("tiny", lambda: model)


@contextlib.contextmanager
def running(served: ModelHost | Models, **options: object) -> Iterator[str]:
    """Run a server on a free port within the context; yields its URL."""
    models = served if isinstance(served, Models) else Models([served])
    app = create_app(models, ServerOptions(**options))  # type: ignore[arg-type]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            wait_for(lambda: server.started)
            yield url
        finally:
            server.should_exit = True
            thread.join(DEADLINE)
        assert not thread.is_alive()


def wait_until_ready(url: str) -> None:
    """Wait until the model is in memory."""
    wait_for(lambda: httpx.get(f"{url}/health", timeout=DEADLINE).status_code == 200)


@contextlib.contextmanager
def ready(model: Redrafter, **options: object) -> Iterator[str]:
    """Serve a model within the context; yields the server's URL once the model is in memory."""
    with running(host(model), **options) as url:
        wait_until_ready(url)
        yield url


def named_events(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream, each of which is named as its type."""
    blocks = [block.split("\n") for block in text.strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [kind.removeprefix("event: ") for kind, _ in blocks] == [e["type"] for e in events]
    return events


class Held:
    """A model whose answers pause after `after` tokens until `let_go` is set.

    begun, ended: number of answers that have begun, and that have ended, in any way
    paused: whether an answer has paused
    """

    def __init__(self, model: Redrafter, after: int) -> None:
        self._arespond, self._after = model.arespond, after
        self.begun, self.ended, self.paused, self.let_go = 0, 0, False, False

    async def __call__(self, request: Request) -> AsyncGenerator[Response, None]:
        self.begun += 1
        try:
            if not self._after:
                await self._wait()
            async with contextlib.aclosing(self._arespond(request)) as responses:
                async for response in responses:
                    yield response
                    if response.generation_tokens >= self._after:
                        await self._wait()
        finally:
            self.ended += 1

    async def _wait(self) -> None:
        self.paused = True
        while not self.let_go:
            await asyncio.sleep(0.01)


def hold(model: Redrafter, after: int) -> Held:
    """Let the answers of a model pause after `after` tokens."""
    held = Held(model, after)
    model.arespond = held  # type: ignore[method-assign, assignment]
    return held


def figure(url: str, name: str) -> float:
    """Return a metric of /metrics, summed over its labels."""
    lines = httpx.get(f"{url}/metrics", timeout=DEADLINE).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.split("{")[0].split()[0] == name)


def main() -> None:
    """Run `redrafter-mlx serve` with the tiny model, for tests that need a separate process.

    Arguments: the port; the number of tokens after which an answer pauses (0: never); a file that
    lets paused answers go on; and the seconds in which answers may finish after Ctrl-C.
    """
    port, after, let_go = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    process.FINISH_SECONDS = float(sys.argv[4])
    model = tiny_redrafter()
    if after:
        held = hold(model, after)

        def watch() -> None:
            while not let_go.exists():
                time.sleep(0.01)
            held.let_go = True

        threading.Thread(target=watch, daemon=True).start()
    opt.load_model = lambda *_, **__: model
    sys.exit(cli.run(["serve", "tiny", "--port", str(port)]))


if __name__ == "__main__":
    main()
