"""The command line: its commands, its errors and its exit status."""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated

import typer

from redrafter_mlx.cli import export, generate, quality, serve, verify
from redrafter_mlx.cli.bench import command as bench
from redrafter_mlx.cli.bench import serve as bench_serve
from redrafter_mlx.cli.chat import command as chat
from redrafter_mlx.cli.doctor import command as doctor
from redrafter_mlx.cli.launch import command as launch
from redrafter_mlx.cli.learn import command as learn
from redrafter_mlx.cli.models import command as models
from redrafter_mlx.cli.models import kept
from redrafter_mlx.cli.short_help import HELP_ALL, Command
from redrafter_mlx.cli.terminal import (
    INTERRUPTED,
    check_text,
    one_line,
    open_missing_streams,
    tolerate_any_text,
)
from redrafter_mlx.cli.train import command as train
from redrafter_mlx.cli.tune import command as tune
from redrafter_mlx.errors import EngineFailedError, RedrafterError, device_failure
from redrafter_mlx.runtime.files.paths import keep_own_kernels
from redrafter_mlx.runtime.processes.launched import (
    leave_to_rank_0,
    let_rank_0_fail,
    rank_0_speaks,
    wait_for_loss,
)
from redrafter_mlx.version import __version__

_BY_RANKS = ("generate", "chat", "serve", "verify", "train", "bench", "tune")
"""Commands that all ranks of `mlx.launch` run together; only rank 0 runs the others."""

_TWO_WORDS = "bench serve"  # the command whose name is two words, beside `bench MODEL`

app = typer.Typer(
    name="redrafter-mlx",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    rich_markup_mode="markdown",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"redrafter-mlx {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Local language models on MLX, faster and with the same output, by speculative decoding.

    Start with `redrafter-mlx chat`; `redrafter-mlx doctor` examines this machine.
    """
    if context.invoked_subcommand not in _BY_RANKS:
        leave_to_rank_0()
    if context.invoked_subcommand is None:
        print(context.get_help())


app.command("generate", cls=Command)(generate.command)
app.command("chat", cls=Command)(chat.command)
app.command("serve", cls=Command)(serve.command)
app.command("launch", cls=Command)(launch.command)
app.command("pull", cls=Command)(models.pull)
app.command("list", cls=Command)(models.list_all)
app.command("show", cls=Command)(models.show)
app.command("drafters", cls=Command)(models.drafters)
app.command("doctor", cls=Command)(doctor.command)
app.command("verify", cls=Command)(verify.command)
app.command("train", cls=Command)(train.command)
app.command("learn", cls=Command)(learn.command)
app.command("cache", cls=Command)(kept.cache)
app.command("corpora", cls=Command)(kept.corpora)
app.command("quality", cls=Command)(quality.command)
app.command("bench", cls=Command)(bench.command)
app.command(_TWO_WORDS, cls=Command)(bench_serve.command)
app.command("tune", cls=Command)(tune.command)
app.command("export", cls=Command)(export.command)


def main() -> None:
    """Run the console script's command and exit with its status."""
    open_missing_streams()
    quieten_libraries()
    tolerate_any_text()
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line; an error that a user can cause becomes one line on stderr."""
    try:
        for argument in arguments:
            check_text("an argument", argument)
        if " ".join(arguments[:2]) == _TWO_WORDS:
            arguments = [_TWO_WORDS, *arguments[2:]]
        keep_own_kernels()
        with rank_0_speaks():
            shown = HELP_ALL if HELP_ALL in arguments else None
            arguments = ["--help" if a == HELP_ALL else a for a in arguments]
            status = app(arguments, prog_name="redrafter-mlx", standalone_mode=False, obj=shown)
            sys.stdout.flush()  # so that a full disk or a closed pipe is reported here
        return status if isinstance(status, int) else 0
    except RedrafterError as error:
        if isinstance(error, EngineFailedError):
            wait_for_loss()
        return _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except OSError as error:
        if error.errno == errno.EPIPE:
            return _reader_left()
        if error.errno == errno.ENOSPC and error.filename is None:
            _discard_output()
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}")
    except SystemExit as exit_:  # typer exits with 1 after a closed pipe
        return _reader_left() if exit_.code == 1 else int(exit_.code or 0)
    except Exception as error:
        if why := device_failure(error):
            return _fail(why)
        # Usage errors are click's or typer's own, depending on typer's version.
        explain = getattr(error, "format_message", None)
        if explain is None:
            raise
        context = getattr(error, "ctx", None)
        named = [name for name in arguments[:1] if not name.startswith("-")]
        command = context.command_path if context else " ".join(["redrafter-mlx", *named])
        return _fail(f"{explain().rstrip('.')}; see {command} --help", status=2)


def quieten_libraries() -> None:
    """Silence the libraries' advice and progress bars; errors stay."""
    for name, value in (
        ("TRANSFORMERS_VERBOSITY", "error"),
        ("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1"),
        ("HF_HUB_DISABLE_PROGRESS_BARS", "1"),
        ("HF_HUB_VERBOSITY", "error"),
        ("HF_HUB_DISABLE_TELEMETRY", "1"),
        ("TOKENIZERS_PARALLELISM", "false"),
    ):
        os.environ.setdefault(name, value)


def _fail(message: str, status: int = 1) -> int:
    let_rank_0_fail()
    print(f"error: {one_line(message)}", file=sys.stderr)
    return status


def _reader_left() -> int:
    """Return the exit status after a closed pipe."""
    _discard_output()
    return 1


def _discard_output() -> None:
    """Keep Python from writing again, as it ends, what could not be written."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())


if __name__ == "__main__":
    main()
