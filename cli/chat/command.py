"""`redrafter-mlx chat`: read a turn, stream the answer, until the user leaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

import typer

from redrafter_mlx.cli import options as opt
from redrafter_mlx.cli.chat import commands as chat_commands
from redrafter_mlx.cli.chat.line_editing import line_editing
from redrafter_mlx.cli.flag import Flag
from redrafter_mlx.cli.learn.show import summary
from redrafter_mlx.cli.models.offer import offer_drafter
from redrafter_mlx.cli.progress import PrefillLine
from redrafter_mlx.cli.serve import API_KEY
from redrafter_mlx.cli.terminal import (
    CONTEXT_IS_FULL,
    StopKey,
    Terminal,
    check_text,
    loss_note,
    quiet_interrupts,
    shape_note,
    shares_line,
    statistics_line,
)
from redrafter_mlx.config import GenerationOptions
from redrafter_mlx.errors import BadInputError, RedrafterError
from redrafter_mlx.runtime.processes.launched import leave_to_rank_0
from redrafter_mlx.runtime.words import count, option_name

if TYPE_CHECKING:
    from redrafter_mlx.cli.chat.remote import RemoteModel, RemoteSession, RemoteToken
    from redrafter_mlx.engine.engine import Redrafter
    from redrafter_mlx.engine.session import Session
    from redrafter_mlx.learning.keeper import TextKeeper
    from redrafter_mlx.response import Response, Source

PROMPT = ">>> "
MORE = "... "
QUOTES = '"""'
_DEFAULTS = GenerationOptions(max_tokens=1024)


_WITHOUT_TEMPLATE = "`redrafter-mlx generate --raw` continues plain text"


@dataclass
class Chat:
    """A running chat."""

    model: Redrafter | RemoteModel
    session: Session | RemoteSession
    options: GenerationOptions
    terminal: Terminal
    defaults: GenerationOptions = _DEFAULTS  # the options that `/set NAME default` returns to
    show_drafts: bool = False  # colour each token by its source, and count them for the statistics
    show_statistics: bool = True
    count_tokens: Callable[[str], int] | None = None  # of a text; None if only the server can
    keeper: TextKeeper | None = None  # keeps the answers, for the drafter to learn from
    files: dict[str, str] = field(default_factory=dict)  # that /read sends next, by name
    leaving: bool = False
    failed: bool = False  # whether anything was refused; in a pipe the exit status is then 1


@opt.with_options
def command(
    *,
    system: opt.System = None,
    show_drafts: Annotated[bool, Flag("Colour each token by where it came from.")] = False,
    server: Annotated[
        str | None, Flag("Talk with a model that `redrafter-mlx serve` serves there.", "URL")
    ] = None,
    api_key: Annotated[
        str | None,
        replace(API_KEY, help=f"What the server asks for. [env: {API_KEY.variable}]", panel=None),
    ] = None,
    generation: GenerationOptions = _DEFAULTS,
    loading: opt.LearningModelOptions,
) -> None:
    """Talk with a model; /help inside lists what can be done.

    Without a terminal, each line of stdin is a turn: answers go to stdout, all else to stderr.
    """
    model: Redrafter | RemoteModel
    session: Session | RemoteSession
    count_tokens: Callable[[str], int] | None = None
    keeper: TextKeeper | None = None
    if server is None:
        if generation.draft:
            offer_drafter(loading)
        model = opt.load_model(loading, chat_or=_WITHOUT_TEMPLATE)
        session, count_tokens = model.session(system), token_counter(model)
        keeper = model.keeper
    else:
        leave_to_rank_0()
        from redrafter_mlx.cli.chat.remote import RemoteSession, connect

        for name, value in vars(replace(loading, model=None)).items():
            if value != getattr(opt.LearningModelOptions, name):
                option = option_name(name)
                raise BadInputError(f"{option} is the server's; give it to `redrafter-mlx serve`")
        model, client = connect(server, loading.model, api_key)
        session = RemoteSession(client, system)
    chat = Chat(
        model,
        session,
        generation,
        Terminal.standard(),
        show_drafts=show_drafts,
        count_tokens=count_tokens,
        keeper=keeper,
    )
    if model.drafter_note and generation.draft:
        chat.terminal.note(model.drafter_note)
    if keeper is not None:
        chat.terminal.note(summary(keeper.folder))
    raise typer.Exit(run_chat(chat))


def token_counter(model: Redrafter) -> Callable[[str], int]:
    """Return a function that counts a text's tokens; BadInputError if it is too long."""
    return lambda text: len(model.encode(text, raw=True))


def run_chat(chat: Chat) -> int:
    """Take turns until /exit or the end of input; return the exit status."""
    terminal = chat.terminal
    if terminal.interactive:
        terminal.say(
            f"{chat_commands.describe_model(chat)}; /help lists the commands, Ctrl-D leaves"
        )
        if chat.show_drafts:
            terminal.write("tokens by source:")
            for source in ("model", "drafter", "lookup"):
                terminal.write(" ")
                terminal.write(source, source)
            terminal.write("\n")
    with line_editing(terminal.interactive):
        while not chat.leaving:
            try:
                text, quoted = read_turn(terminal)
                if text.startswith("/") and not quoted:
                    chat_commands.run_command(chat, text)
                elif text.strip():
                    send(chat, check_text("the message", text))
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


def read_turn(terminal: Terminal) -> tuple[str, bool]:
    '''Read one line, or several between `"""` and `"""`; also return whether it was quoted.

    After a line that is `"""` alone, only such a line ends the message, and an indented one is
    part of it, so that quoted code may hold docstrings. After `"""` and text, any line does that
    ends in `"""`. Raises EOFError at the input's end, BadInputError inside the quotation marks.
    '''
    line = terminal.read_line(PROMPT)
    if not line.startswith(QUOTES):
        return line, False
    alone = line.rstrip() == QUOTES
    lines = ["" if alone else line[len(QUOTES) :]]
    while not (lines[-1].rstrip() == QUOTES if alone else lines[-1].rstrip().endswith(QUOTES)):
        try:
            lines.append(terminal.read_line(MORE))
        except EOFError:
            if terminal.interactive:
                terminal.say("")
            where = " on a line of its own" if alone else ""
            raise BadInputError(
                f"the message lacks its closing {QUOTES}{where}; not sent"
            ) from None
    return "\n".join(lines).rstrip()[: -len(QUOTES)].strip("\n"), True


def send(chat: Chat, text: str) -> None:
    """Answer a message and the files of /read; they stay if it does not join the conversation."""
    before = len(chat.session.messages)
    try:
        answer(chat, chat_commands.with_files(chat.files, text))
    finally:
        if len(chat.session.messages) > before:
            chat.files.clear()
        elif chat.files:
            names = ", ".join(chat.files)
            chat.terminal.note(f"still with the next message: {names}; /read none drops it")


def answer(chat: Chat, text: str) -> None:
    """Stream one answer; Ctrl-C ends it, and the conversation keeps its text so far."""
    last, end = None, "\n"
    sources: Counter[Source] = Counter()
    interrupts = quiet_interrupts(chat.terminal)
    with interrupts, StopKey() as key, PrefillLine(chat.terminal.stderr) as line:
        responses = chat.session.stream(text, options=chat.options, on_prefill=line.update)
        try:
            for last in responses:
                key.answering = chat.session.ends_between_tokens
                line.erase()
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
            line.erase()
            responses.close()
            if end != "\n":
                chat.terminal.write("\n")
    if key.pressed and not chat.terminal.interactive:
        raise KeyboardInterrupt
    finish_answer(chat, last, sources, key.pressed)


def finish_answer(
    chat: Chat, last: Response | RemoteToken | None, sources: Counter[Source], stopped: bool
) -> None:
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
        steps = (last.usual_shape, last.usual_nodes, last.tokens_per_step)
        shares, shown = shares_line(sources), chat.show_drafts
        shape = shape_note(*steps, None if shown else shares)
        kept = None if chat.keeper is None else f"{count(chat.keeper.kept, 'answer')} kept"
        notes = (shares if shown else None, shape, loss_note(chat.options), kept, note)
        chat.terminal.note(statistics_line(*rates, *notes))
