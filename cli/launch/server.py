"""The server that an agent uses: one that runs already, or one that is started for it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import FrameType

from redrafter_mlx.bench.measure.load_client import Server
from redrafter_mlx.cli.launch.agents import KEY_VARIABLE, Served
from redrafter_mlx.errors import BadInputError, ServerError

_HOST = "127.0.0.1"
_POLL_SECONDS = 0.2
_ANSWER_SECONDS = 10
_END_SECONDS = 10


@contextlib.contextmanager
def served(
    port: int,
    model: str | None,
    api_key: str | None,
    options: Sequence[str],
    note: Callable[[str], None],
) -> Iterator[Served]:
    """Yield the server at a port of this machine; start one for the time if none listens there.

    model:   that the server must serve; None takes what it serves
    options: of `redrafter-mlx serve`, for a server that is started
    note:    shows one line to the user
    Raises BadInputError if it serves others, ServerError if it cannot be used, or ended.
    """
    if _state(port) is not None:
        while _state(port) is False:
            time.sleep(_POLL_SECONDS)
        found = _model_at(port, api_key, model)
        note(f"using the server at {found.url}, which serves {found.model}")
        yield found
        return
    with _started(port, api_key, options, note) as started:
        yield started


def _state(port: int) -> bool | None:
    """Return whether the server at a port is ready; None if there is none."""
    connection = HTTPConnection(_HOST, port, timeout=_ANSWER_SECONDS)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except ConnectionRefusedError:
        return None
    except (OSError, HTTPException) as error:
        raise ServerError(f"what listens at port {port} is no server of ours: {error}") from None
    finally:
        connection.close()


def _model_at(port: int, api_key: str | None, model: str | None = None) -> Served:
    """Return a model of a running server of ours, by default its first one; errors as above."""
    url = f"http://{_HOST}:{port}"
    entries = Server(f"{url}/v1", None, api_key).models()
    if not entries or entries[0].get("owned_by") != "redrafter-mlx":
        raise ServerError(f"the server at {url} is not redrafter-mlx; choose another --port")
    named = [entry for entry in entries if model in (None, entry["id"])]
    if not named:
        raise BadInputError(
            f"the server at {url} serves {', '.join(str(entry['id']) for entry in entries)}, not "
            f"{model}; leave out --model, or start another server with --port"
        )
    entry = named[0]
    context, own = entry.get("max_model_len"), entry.get("x_redrafter")
    return Served(
        url,
        str(entry["id"]),
        context if isinstance(context, int) else None,
        api_key,
        loaded=isinstance(own, dict) and own.get("loaded") is True,
    )


def _loaded_at(port: int, api_key: str | None) -> Served | None:
    """Return the model of a server that was started; None until it is loaded.

    A server whose model cannot be loaded is ready for a moment, before it ends.
    """
    with contextlib.suppress(ServerError):
        if _state(port) is True and (found := _model_at(port, api_key)).loaded:
            return found
    return None


@contextlib.contextmanager
def _started(
    port: int, api_key: str | None, options: Sequence[str], note: Callable[[str], None]
) -> Iterator[Served]:
    """Run a server whose log is a file, and end it at last, also when the terminal is closed.

    Ctrl-C does not reach it: it is the agent's. Raises ServerError if it ends itself.
    """
    handlers = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    descriptor, name = tempfile.mkstemp(prefix="redrafter-mlx-", suffix=".log")
    log = Path(name)
    environment = dict(os.environ) if api_key is None else {**os.environ, KEY_VARIABLE: api_key}
    with os.fdopen(descriptor, "wb") as written:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "redrafter_mlx.cli.main",
                "serve",
                "--port",
                str(port),
                *options,
            ],
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=written,
            start_new_session=True,
            env=environment,
        )
    try:
        note(f"starting a server; its log is {log}")
        while (started := _loaded_at(port, api_key)) is None:
            if process.poll() is not None:
                lines = log.read_text("utf-8", "replace").strip().splitlines()
                why = lines[-1].removeprefix("error: ") if lines else "it said nothing"
                raise ServerError(f"the server ended: {why}")
            time.sleep(_POLL_SECONDS)
        yield started
    finally:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.unlink(missing_ok=True)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
