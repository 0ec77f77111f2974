"""`redrafter-mlx launch`: start a coding agent on a model of this machine."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated

import typer

from redrafter_mlx.checks import check_int
from redrafter_mlx.cli import options as opt
from redrafter_mlx.cli.launch.agents import AGENTS, KEY_VARIABLE, Served, Start, agent_named
from redrafter_mlx.cli.launch.server import served
from redrafter_mlx.cli.serve import API_KEY, SERVING
from redrafter_mlx.cli.terminal import Terminal
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.words import option_name


@opt.with_options
def command(
    *,
    agent: Annotated[
        str, typer.Argument(metavar="|".join(AGENTS), help="The agent.", show_default=False)
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGS...]", help="Given to the agent.", show_default=False),
    ] = None,
    loading: opt.ModelOptions,
    port: Annotated[int, SERVING["port"]] = 8080,
    api_key: Annotated[str | None, API_KEY] = None,
) -> None:
    """Start Codex, Claude Code or opencode on a model of this machine.

    A server that runs at the port is used; otherwise one is started, and ends with the agent. The
    agent is set by its environment and command line alone: no file of yours is changed. Example:
    redrafter-mlx launch codex --model qwen3-8b -- exec "Explain this folder"
    """
    known, terminal = agent_named(agent), Terminal.standard()
    check_int("--port", port, 1, 65535)
    program = shutil.which(known.program)
    if program is None:
        raise BadInputError(
            f"{known.program} is not installed; install it with: npm install -g {known.package}"
        )
    options = _options(loading)
    with served(port, loading.model, api_key, options, terminal.note) as server:
        start = known.start(server)
        given = [*start.arguments, *(arguments or ())]
        terminal.note("by hand, this is:")
        for line in _by_hand(known.program, start, given, server, [*options, "--port", str(port)]):
            terminal.note(f"  {line}")
        raise typer.Exit(_run([program, *given], start))


def _options(loading: opt.ModelOptions) -> list[str]:
    default, options = opt.ModelOptions(), list[str]()
    for field in fields(loading):
        value = getattr(loading, field.name)
        if value != getattr(default, field.name):
            options += [option_name(field.name), *([] if value is True else [str(value)])]
    return options


def _by_hand(
    program: str, start: Start, given: Sequence[str], server: Served, options: Sequence[str]
) -> list[str]:
    """Return the commands that do the same; a key stays in its variable."""
    lines = [shlex.join(["redrafter-mlx", "serve", *options])]
    shown = [f"{name}={_quoted(value, server)}" for name, value in (start.variables or {}).items()]
    if shown:
        lines.append(" ".join(["export", *shown]))
    return [*lines, shlex.join([program, *given])]


def _quoted(value: str, server: Served) -> str:
    """Return a variable's value for a shell, with the key by its variable."""
    key = server.api_key
    if key is None or key not in value:
        return shlex.quote(value)
    return f'"${KEY_VARIABLE}"'.join(shlex.quote(part) if part else "" for part in value.split(key))


def _run(command: Sequence[str], start: Start) -> int:
    """Run an agent in this terminal and return its exit status; Ctrl-C is the agent's alone."""
    before = signal.signal(signal.SIGINT, lambda *_: None)  # which a new program does not inherit
    kept = {name: value for name, value in os.environ.items() if name not in start.unset}
    environment = {**kept, **(start.variables or {})}
    try:
        status = subprocess.run(command, env=environment, check=False).returncode
    finally:
        signal.signal(signal.SIGINT, before)
    return status if status >= 0 else 128 - status
