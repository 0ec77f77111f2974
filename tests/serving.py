"""A server for tests: a tiny random model on a free local port."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence

import httpx2 as httpx
import uvicorn
from tiny import byte_model, byte_tokenizer

from redrafter_mlx.cli import main as cli
from redrafter_mlx.cli import options as opt
from redrafter_mlx.config import GenerationOptions
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.options import EngineOptions
from redrafter_mlx.response import Response
from redrafter_mlx.server.app import create_app
from redrafter_mlx.server.hosting import ModelHost
from redrafter_mlx.server.options import ServerOptions

DEADLINE = 20.0
CONTEXT = 2048


class AlwaysDrafting(Redrafter):
    """A redrafter that drafts in every possible step, independent of measured times."""

    def chosen_options(
        self, options: GenerationOptions | None, overrides: Mapping[str, object]
    ) -> GenerationOptions:
        return super().chosen_options(options, {**overrides, "beam_width": 1, "beam_length": 5})


def tiny_redrafter(seed: int = 0, engine: EngineOptions | None = None) -> Redrafter:
    """Return a model whose tokens are bytes, with prompt lookup."""
    model = byte_model(seed, max_position_embeddings=CONTEXT)
    return AlwaysDrafting(model, byte_tokenizer(), "lookup", engine=engine)


def host(model: Redrafter, name: str = "tiny", unload_after: float | None = None) -> ModelHost:
    return ModelHost(name, lambda: model, unload_after=unload_after)


@contextlib.contextmanager
def running(models: Sequence[ModelHost], **options: object) -> Iterator[str]:
    """Run a server on a free port within the context; yields its URL."""
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
    """Wait until every model is in memory."""
    wait_for(lambda: httpx.get(f"{url}/health").status_code == 200)


def wait_for(reached: Callable[[], bool]) -> None:
    """Wait until a condition holds; fails if that takes too long."""
    end = time.monotonic() + DEADLINE
    while not reached():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def figure(url: str, name: str) -> float:
    """Return a metric of /metrics, summed over its labels."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.split("{")[0].split()[0] == name)


def main() -> None:
    """Run `redrafter-mlx serve` with the tiny model, for tests that need a separate process.

    Arguments: the port, the number of tokens from which on an answer pauses after each one
    (0: never), and the length of a pause in seconds.
    """
    port, most, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    model = tiny_redrafter()
    sound = model.astream

    async def stuck(*args: object, **options: object) -> AsyncGenerator[Response, None]:
        async with contextlib.aclosing(sound(*args, **options)) as responses:  # type: ignore[arg-type]
            async for response in responses:
                yield response
                if response.generation_tokens >= most:
                    await asyncio.sleep(seconds)

    if most:
        model.astream = stuck  # type: ignore[method-assign, assignment]
    opt.load_model = lambda *_: model
    sys.exit(cli.run(["serve", "tiny", "--port", str(port)]))


if __name__ == "__main__":
    main()
