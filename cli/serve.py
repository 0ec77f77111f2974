"""`redrafter-mlx serve`: the APIs of OpenAI and Anthropic for a model on this machine."""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from redrafter_mlx.cli import options as opt
from redrafter_mlx.cli.flag import Flag
from redrafter_mlx.cli.offer import offer_drafter
from redrafter_mlx.cli.terminal import INTERRUPTED, Terminal, one_line
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.launched import launched_rank
from redrafter_mlx.server.options import ServerOptions

if TYPE_CHECKING:
    from redrafter_mlx.engine.engine import Redrafter

_SERVER, _LIMITS = "Server", "Limits"

API_KEY = Flag(
    "What clients must send; needed to listen beyond this machine. [env: REDRAFTER_API_KEY]",
    "KEY", _SERVER, variable="REDRAFTER_API_KEY",
)  # fmt: skip

SERVING: Mapping[str, Flag] = {
    "host": Flag("Address to listen on.", "HOST", _SERVER),
    "port": Flag("0 takes any free one.", "PORT", _SERVER),
    "api_key": API_KEY,
    "allow_host": Flag(
        "Requests may call this server by this name; may be given several times.", "NAME", _SERVER
    ),
    "cors_origin": Flag(
        "Web pages of this origin may ask; may be given several times.", "ORIGIN", _SERVER
    ),
    "log_level": Flag("What is logged to stderr.", "debug|info|warning|error", _SERVER),
    "max_concurrency": Flag("Answers generated at once.", "N", _LIMITS),
    "max_queue": Flag("Answers that may wait; more are refused.", "N", _LIMITS),
    "max_body": Flag("Largest request.", "MB", _LIMITS, unit=1_000_000),
    "keep_alive": Flag("Close an idle connection after this.", "SECONDS", _LIMITS),
    "unload_after": Flag("Unload an idle model after this. [default: never]", "SECONDS", _LIMITS),
    "cache_dir": Flag("Keep prompts that were read here, for after a restart.", "DIR", _LIMITS),
    "cache_bytes": Flag(
        "Limit of that folder, such as 20GB. [default: a tenth of the free disk]", "N", _LIMITS
    ),
}  # fmt: skip
"""The fields of ServerOptions that are options."""


@opt.with_options
def command(
    *,
    serving: Annotated[ServerOptions, SERVING],
    loading: opt.LearningModelOptions,
) -> None:
    """Serve a model by OpenAI's and Anthropic's APIs, for agents, editors and the page at /.

    Example: redrafter-mlx serve smollm2-135m --port 8080
    """
    if launched_rank() is not None and serving.unload_after is not None:
        raise BadInputError("ranks share one model until they end; leave out --unload-after")
    if launched_rank():
        opt.load_model(loading)  # never returns: only rank 0 listens
    offer_drafter(loading)
    run(serving, loading)


def run(serving: ServerOptions, loading: opt.ModelOptions) -> None:
    """Serve until Ctrl-C; raises the error of the model's first load, if it fails."""
    try:
        import uvicorn
        from uvicorn.config import LOGGING_CONFIG

        from redrafter_mlx.server.app import create_app
        from redrafter_mlx.server.hosting import ModelHost
        from redrafter_mlx.server.process import Server, log_formatter
        from redrafter_mlx.server.tasks import Ending
    except ModuleNotFoundError as error:
        raise BadInputError(
            f"the server needs {error.name}; install it with: pip install 'redrafter-mlx[serve]'"
        ) from None
    from redrafter_mlx.engine.options import EngineOptions
    from redrafter_mlx.weights.registry import DEFAULT_MODEL

    folder = None if serving.cache_dir is None else Path(serving.cache_dir)
    engine = EngineOptions(
        serving.max_concurrency, cache_dir=folder, cache_bytes=serving.cache_bytes
    )
    failures: list[Exception] = []
    ending = Ending()

    def failed(error: Exception) -> None:
        failures.append(error)
        server.should_exit = True

    def load() -> Redrafter:
        loaded = opt.load_model(loading, engine)
        if loaded.drafter_note:
            Terminal.standard().note(loaded.drafter_note)
        if not loaded.tokenizer.has_chat_template:
            Terminal.standard().note(
                "this model has no chat template: chats are refused, and /v1/completions continues "
                "plain text"
            )
        return loaded

    host = ModelHost(loading.model or DEFAULT_MODEL, load, unload_after=serving.unload_after)
    logging = copy.deepcopy(LOGGING_CONFIG)
    logging["formatters"]["default"] = {"()": lambda: log_formatter(one_line)}
    logging["loggers"]["redrafter_mlx"] = {
        "handlers": ["default"], "level": serving.log_level.upper(), "propagate": False,
    }  # fmt: skip
    config = uvicorn.Config(
        create_app(host, serving, failed=failed, ending=ending),
        log_config=logging,
        log_level="warning" if serving.log_level == "info" else serving.log_level,
        access_log=serving.log_level == "debug",
        timeout_keep_alive=serving.keep_alive,
    )
    server = Server(config, ending)
    with _listen(serving) as listener:
        shown = f"[{serving.host}]" if ":" in serving.host else serving.host
        url = f"http://{shown}:{listener.getsockname()[1]}"
        Terminal.standard().note(f"listening on {url} (API at {url}/v1); Ctrl-C ends it")
        try:
            server.run(sockets=[listener])
        except KeyboardInterrupt:
            if host.in_thread:  # which may keep downloading for minutes
                from rich.console import Console

                if (console := Console(stderr=True)).is_terminal:
                    console.show_cursor()  # which a progress bar has hidden
                    console.print()
                os._exit(INTERRUPTED)
            raise
    if failures:
        raise failures[0]


def _listen(serving: ServerOptions) -> socket.socket:
    """Return a socket that listens on the server's address; raises BadInputError if it cannot."""
    try:
        found = socket.getaddrinfo(
            serving.host, serving.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        # Of `localhost`, clients try 127.0.0.1 first, or nothing else.
        family, kind, protocol, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise BadInputError(f"host is {serving.host!r}, which is no address: {error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()  # early clients wait until the server runs
    except OSError as error:
        listener.close()
        raise BadInputError(
            f"cannot listen on {serving.host}:{serving.port}: {error.strerror}; "
            f"choose another --port"
        ) from None
    return listener
