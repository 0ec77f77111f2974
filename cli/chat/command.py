"""`redrafter-mlx chat`: read a turn, stream the answer, until the user leaves."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from redrafter_mlx.cli import options as opt
from redrafter_mlx.cli.chat import commands as chat_commands
from redrafter_mlx.cli.serve import API_KEY_VARIABLE
from redrafter_mlx.cli.terminal import (
    CONTEXT_IS_FULL,
    StopKey,
    Terminal,
    check_text,
    loss_note,
    shares_line,
    statistics_line,
)
from redrafter_mlx.cli.tune import shape_note
from redrafter_mlx.config import GenerationOptions
from redrafter_mlx.errors import BadInputError, RedrafterError
from redrafter_mlx.runtime.launched import leave_to_rank_0

if TYPE_CHECKING:
    from redrafter_mlx.cli.chat.remote import RemoteModel, RemoteSession, RemoteToken
    from redrafter_mlx.decoding.step_result import Source
    from redrafter_mlx.engine.engine import Redrafter
    from redrafter_mlx.engine.session import Session
    from redrafter_mlx.response import Response

PROMPT = ">>> "
MORE = "... "
QUOTES = '"""'
_DEFAULTS = GenerationOptions(max_tokens=1024)
_HISTORY_LINES = 1000


@dataclass
class Chat:
    """A running chat.

    defaults: the options that `/set NAME default` returns to
    show_drafts: colour each token by its source, and count them in the statistics line
    failed: whether anything was refused; in a pipe the exit status is then 1
    """

    model: Redrafter | RemoteModel
    session: Session | RemoteSession
    options: GenerationOptions
    terminal: Terminal
    defaults: GenerationOptions = _DEFAULTS
    show_drafts: bool = False
    show_statistics: bool = True
    leaving: bool = False
    failed: bool = False


@opt.with_options
def command(
    *,
    system: opt.System = None,
    show_drafts: Annotated[
        bool,
        typer.Option("--show-drafts", help="Colour each token by where it came from."),
    ] = False,
    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            metavar="URL",
            show_default=False,
            help="Talk with a model that `redrafter-mlx serve` serves there.",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            show_default=False,
            envvar=API_KEY_VARIABLE,
            show_envvar=False,
            help=f"What the server asks for. [env: {API_KEY_VARIABLE}]",
        ),
    ] = None,
    generation: GenerationOptions = _DEFAULTS,
    loading: opt.ModelOptions,
) -> None:
    """Talk with a model; /help inside lists what can be done.

    Without a terminal, each line of stdin is a turn: answers go to stdout, all else to stderr.
    """
    model, session = _open(server, api_key, loading, system)
    chat = Chat(model, session, generation, Terminal.standard(), show_drafts=show_drafts)
    if model.drafter_note and generation.draft:
        chat.terminal.note(model.drafter_note)
    raise typer.Exit(run_chat(chat))


def _open(
    url: str | None, api_key: str | None, loading: opt.ModelOptions, system: str | None
) -> tuple[Redrafter | RemoteModel, Session | RemoteSession]:
    """Return the model, on a server or loaded here, and a new conversation with it."""
    if url is None:
        loaded = opt.load_model(loading)
        return loaded, loaded.session(system)
    leave_to_rank_0()
    from redrafter_mlx.cli.chat.remote import RemoteSession, connect

    for name, value in asdict(replace(loading, model=None)).items():
        if value != getattr(opt.ModelOptions, name):
            raise BadInputError(
                f"--{name.replace('_', '-')} is the server's; give it to `redrafter-mlx serve`"
            )
    model, server = connect(url, loading.model, api_key)
    return model, RemoteSession(server, system)


def run_chat(chat: Chat) -> int:
    """Take turns until /exit or the end of input; return the exit status."""
    terminal = chat.terminal
    if terminal.interactive:
        terminal.say(
            f"{chat_commands.describe_model(chat)}; /help lists the commands, Ctrl-D leaves"
        )
        if chat.show_drafts:
            write_legend(terminal)
    with line_editing(terminal.interactive):
        while not chat.leaving:
            try:
                take_turn(chat, *read_turn(terminal))
            except EOFError:
                if terminal.interactive:
                    terminal.say("")
                break
            except KeyboardInterrupt:
                if not terminal.interactive:
                    raise
                terminal.say("\nCtrl-D or /exit leaves")
            except RedrafterError as error:
                chat.failed = True
                terminal.error(str(error))
    return 1 if chat.failed and not terminal.interactive else 0


def write_legend(terminal: Terminal) -> None:
    """Write `tokens by source: model drafter lookup`, each source in its style."""
    terminal.write("tokens by source:")
    for source in ("model", "drafter", "lookup"):
        terminal.write(" ")
        terminal.write(source, source)
    terminal.write("\n")


def take_turn(chat: Chat, text: str, quoted: bool) -> None:
    """Run a command or answer a message; ignore an empty line."""
    if text.startswith("/") and not quoted:
        chat_commands.run_command(chat, text)
    elif text.strip():
        answer(chat, check_text("the message", text))


def read_turn(terminal: Terminal) -> tuple[str, bool]:
    '''Read one line, or several between `"""` and `"""`; also return whether it was quoted.

    Raises:
      EOFError: at the end of the input
      BadInputError: the input ended inside the quotation marks
    '''
    line = terminal.read_line(PROMPT)
    if not line.startswith(QUOTES):
        return line, False
    lines = [line[len(QUOTES) :]]
    while not lines[-1].rstrip().endswith(QUOTES):
        try:
            lines.append(terminal.read_line(MORE))
        except EOFError:
            if terminal.interactive:
                terminal.say("")
            raise BadInputError(f"the message lacks its closing {QUOTES}; not sent") from None
    return "\n".join(lines).rstrip()[: -len(QUOTES)].strip("\n"), True


def answer(chat: Chat, text: str) -> None:
    """Stream one answer; Ctrl-C ends it, and the conversation keeps its text so far."""
    last, end = None, "\n"
    sources: Counter[Source] = Counter()
    with StopKey() as key:
        responses = chat.session.stream(text, options=chat.options)
        try:
            for last in responses:
                key.answering = True
                if last.source is not None:
                    sources[last.source] += 1
                chat.terminal.write(last.text, (chat.show_drafts and last.source) or "")
                end = (last.text or end)[-1:]
                if key.pressed:
                    break
        except KeyboardInterrupt:
            key.pressed = True
        finally:
            key.closing = True
            responses.close()
            if end != "\n":
                chat.terminal.write("\n")
    if key.pressed and not chat.terminal.interactive:
        raise KeyboardInterrupt
    finish_answer(chat, last, sources, key.pressed)


def finish_answer(
    chat: Chat, last: Response | RemoteToken | None, sources: Counter[Source], stopped: bool
) -> None:
    """Show the statistics line of an answer."""
    note = "stopped" if stopped else None
    if last is None:
        if stopped:
            chat.terminal.note(statistics_line(0, 0.0, 1.0, note))
        return
    if last.finish_reason == "length":
        full = 0 < last.generation_tokens < chat.options.max_tokens
        note = (
            f"{CONTEXT_IS_FULL}; /clear starts a new conversation"
            if full
            else "ended by max_tokens; /set max_tokens N allows more"
        )
    if last.generation_tokens == 0:  # the server counts no tokens for us
        if note:
            chat.terminal.note(note)
    elif chat.show_statistics:
        rates = (last.generation_tokens, last.generation_tps, last.tokens_per_step)
        shape = shape_note(last.usual_shape, last.usual_nodes, last.tokens_per_step)
        shares = shares_line(sources) if chat.show_drafts else None
        chat.terminal.note(statistics_line(*rates, shares, shape, loss_note(chat.options), note))


@contextlib.contextmanager
def line_editing(wanted: bool) -> Iterator[None]:
    """Enable line editing with a history in our cache folder, if readline is available."""
    try:
        import readline
    except ImportError:
        wanted = False
    if not wanted:
        yield
        return
    from redrafter_mlx.runtime.paths import cache_dir

    history = cache_dir() / "chat_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(_HISTORY_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True)
            history.touch(mode=0o600)
            readline.write_history_file(history)
