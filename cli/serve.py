"""`redrafter-mlx serve`: the APIs of OpenAI and Anthropic for models on this machine."""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from redrafter_mlx.cli import options as opt
from redrafter_mlx.cli.flag import Flag
from redrafter_mlx.cli.models.offer import offer_drafter
from redrafter_mlx.cli.terminal import INTERRUPTED, Terminal, one_line
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.processes.launched import launched_rank
from redrafter_mlx.server.options import ServerOptions

if TYPE_CHECKING:
    from redrafter_mlx.engine.engine import Redrafter

_SERVER, _LIMITS = "Server", "Limits"
_SEVERAL = " Several are loaded as far as memory has room for them, others when asked for."

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
    "load_on_demand": Flag(
        "Requests may name any model on this machine that `list` shows; none is downloaded.",
        panel=_SERVER,
    ),
    "cache_dir": Flag("Keep prompts that were read here, for after a restart.", "DIR", _LIMITS),
    "cache_bytes": Flag(
        "Limit of that folder, such as 20GB. [default: a tenth of the free disk]", "N", _LIMITS
    ),
}  # fmt: skip
"""The fields of ServerOptions that are options."""


@opt.with_options
def command(
    *,
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL", help=f"As in --model.{_SEVERAL}", show_default=False),
    ] = None,
    serving: Annotated[ServerOptions, SERVING],
    loading: opt.LearningModelOptions,
) -> None:
    """Serve models by OpenAI's and Anthropic's APIs, for agents, editors and the page at /.

    Requests without a model's name are answered by the first. Example:
    redrafter-mlx serve smollm2-135m --port 8080
    """
    names = _names(models or [], loading.model)
    if launched_rank() is not None:
        if serving.unload_after is not None:
            raise BadInputError("ranks share one model until they end; leave out --unload-after")
        if len(names) > 1 or serving.load_on_demand:
            raise BadInputError("ranks share one model; name one, without --load-on-demand")
    if launched_rank():
        opt.load_model(replace(loading, model=names[0]))  # never returns: only rank 0 listens
    for name in names:
        offer_drafter(replace(loading, model=name))
    run(serving, loading, names)


def _names(arguments: Sequence[str], option: str | None) -> list[str]:
    """Return the models to serve; raises BadInputError if one is given twice, or in two ways."""
    from redrafter_mlx.weights.registry import DEFAULT_MODEL

    if arguments and option is not None:
        raise BadInputError(
            f"MODEL is {arguments[0]!r:.200}, and --model {option!r:.200}; give all as MODEL"
        )
    names = [*arguments] if option is None else [option]
    for name in names:
        if names.count(name) > 1:
            raise BadInputError(f"MODEL is given twice, as {name!r:.200}; give it once")
    return names or [DEFAULT_MODEL]


def run(serving: ServerOptions, loading: opt.ModelOptions, names: Sequence[str]) -> None:
    """Serve models until Ctrl-C; raises the error of their first load, if one fails."""
    try:
        import uvicorn
        from uvicorn.config import LOGGING_CONFIG

        from redrafter_mlx.server.app import create_app
        from redrafter_mlx.server.hosting import ModelHost
        from redrafter_mlx.server.models import Models
        from redrafter_mlx.server.process import Server, log_formatter
        from redrafter_mlx.server.tasks import Ending
    except ModuleNotFoundError as error:
        raise BadInputError(
            f"the server needs {error.name}; install it with: pip install 'redrafter-mlx[serve]'"
        ) from None
    from redrafter_mlx.engine.options import EngineOptions
    from redrafter_mlx.engine.thread import EngineThread
    from redrafter_mlx.weights.status import memory_needed, names_on_disk

    folder = None if serving.cache_dir is None else Path(serving.cache_dir)
    engine = EngineOptions(
        serving.max_concurrency, cache_dir=folder, cache_bytes=serving.cache_bytes
    )
    failures: list[Exception] = []
    thread = EngineThread()
    ending = Ending()

    def failed(error: Exception) -> None:
        failures.append(error)
        server.should_exit = True

    def load(name: str, offline: bool) -> Redrafter:
        options = replace(loading, model=name, offline=offline)
        loaded = opt.load_model(options, engine, thread=thread)
        if loaded.drafter_note:
            Terminal.standard().note(loaded.drafter_note)
        if not loaded.tokenizer.has_chat_template:
            Terminal.standard().note(
                "this model has no chat template: chats are refused, and /v1/completions continues "
                "plain text"
            )
        return loaded

    def host(name: str, *, named: bool = False) -> ModelHost:
        return ModelHost(
            name,
            partial(load, name, loading.offline or not named),
            unload_after=serving.unload_after,
            nbytes=partial(memory_needed, name, loading.quantize, loading.kv_bits),
            starting=named,
        )

    models = Models(
        [host(name, named=True) for name in names],
        on_disk=names_on_disk if serving.load_on_demand else None,
        offer=host,
        thread=thread,
    )
    logging = copy.deepcopy(LOGGING_CONFIG)
    logging["formatters"]["default"] = {"()": lambda: log_formatter(one_line)}
    logging["loggers"]["redrafter_mlx"] = {
        "handlers": ["default"], "level": serving.log_level.upper(), "propagate": False,
    }  # fmt: skip
    config = uvicorn.Config(
        create_app(models, serving, failed=failed, ending=ending),
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
            if models.in_thread:  # which may keep downloading for minutes
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
