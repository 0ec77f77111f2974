"""`redrafter-mlx chat`: read a turn, stream the answer, until the reader leaves."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import typer

from redrafter_mlx.cli import commands
from redrafter_mlx.cli import options as opt
from redrafter_mlx.cli.terminal import (
    CONTEXT_IS_FULL,
    StopKey,
    Terminal,
    check_text,
    loss_note,
    statistics_line,
)
from redrafter_mlx.cli.tune import shape_note
from redrafter_mlx.config import GenerationOptions
from redrafter_mlx.errors import BadInputError, RedrafterError

if TYPE_CHECKING:
    from redrafter_mlx.cli.generate import Token

PROMPT = ">>> "
MORE = "... "
QUOTES = '"""'
_MAX_TOKENS = 1024
_HISTORY_LINES = 1000


class Conversation(Protocol):
    """What the loop needs of a `Session`."""

    system: str | None
    messages: list[dict[str, str]]

    def stream(
        self, text: str, *, options: GenerationOptions | None = None
    ) -> Generator[Token, None, None]: ...
    def clear(self) -> None: ...


class ChatModel(Protocol):
    """What the loop needs of a `Redrafter`; `source` is a TargetSource or None."""

    @property
    def source(self) -> Any: ...
    @property
    def drafting(self) -> str | None: ...
    @property
    def drafter_note(self) -> str | None: ...
    def session(self, system: str | None = None) -> Conversation: ...


@dataclass
class Totals:
    """Sums over the answers so far."""

    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    tokens_of_steps: float = 0.0

    def add(self, last: Token) -> None:
        """Count one answer by its last token."""
        self.answers += 1
        self.tokens += last.generation_tokens
        if last.generation_tps > 0:
            self.seconds += last.generation_tokens / last.generation_tps
        self.steps += last.steps
        self.tokens_of_steps += last.tokens_per_step * last.steps

    def line(self) -> str:
        """The statistics line of all answers together."""
        rate = self.tokens / self.seconds if self.seconds else 0.0
        per_step = self.tokens_of_steps / self.steps if self.steps else 1.0
        return statistics_line(self.tokens, rate, per_step, f"answers so far: {self.answers}")


@dataclass
class Chat:
    """All that a running chat is: who talks, under which options, and what was counted.

    failed: whether anything was refused; a pipe learns of it by the exit status
    """

    model: ChatModel
    session: Conversation
    options: GenerationOptions
    terminal: Terminal
    show_statistics: bool = True
    leaving: bool = False
    failed: bool = False
    totals: Totals = field(default_factory=Totals)


def command(
    system: opt.System = None,
    max_tokens: opt.MaxTokens = _MAX_TOKENS,
    stop: opt.Stop = None,
    temperature: opt.Temperature = GenerationOptions.temperature,
    top_p: opt.TopP = GenerationOptions.top_p,
    top_k: opt.TopK = GenerationOptions.top_k,
    min_p: opt.MinP = GenerationOptions.min_p,
    repetition_penalty: opt.RepetitionPenalty = GenerationOptions.repetition_penalty,
    seed: opt.Seed = None,
    drafter: opt.DrafterName = "auto",
    no_draft: opt.NoDraft = False,
    beam_width: opt.BeamWidth = None,
    beam_length: opt.BeamLength = None,
    max_nodes: opt.MaxNodes = None,
    accept: opt.Accept = None,
    epsilon: opt.Epsilon = GenerationOptions.epsilon,
    delta: opt.Delta = GenerationOptions.delta,
    model: opt.Model = None,
    dtype: opt.Dtype = "auto",
    quantize: opt.Quantize = None,
    offline: opt.Offline = False,
) -> None:
    """Talk with a model; /help inside lists what can be done.

    Without a terminal, each line of stdin is a turn: answers go to stdout, all else to stderr.
    """
    options = opt.generation_options(
        max_tokens, temperature, top_p, top_k, min_p, seed, stop, beam_width, beam_length,
        max_nodes, accept, epsilon, delta, repetition_penalty, draft=not no_draft,
    )  # fmt: skip
    if system is not None:
        check_text("--system", system)
    loaded = opt.load_model(model, drafter, dtype, quantize, offline)
    chat = Chat(loaded, loaded.session(system), options, Terminal.standard())
    if loaded.drafter_note and not no_draft:
        chat.terminal.note(loaded.drafter_note)
    raise typer.Exit(run_chat(chat))


def run_chat(chat: Chat) -> int:
    """Turn after turn until /exit or the end of input; returns the exit status."""
    terminal = chat.terminal
    if terminal.interactive:
        terminal.say(f"{commands.describe_model(chat)}; /help lists the commands, Ctrl-D leaves")
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


def take_turn(chat: Chat, text: str, quoted: bool) -> None:
    """Carry out a command or answer a message; an empty line is neither."""
    if text.startswith("/") and not quoted:
        commands.run_command(chat, text)
    elif text.strip():
        answer(chat, check_text("the message", text))


def read_turn(terminal: Terminal) -> tuple[str, bool]:
    '''One line, or several between `"""` and `"""`; and whether it was quoted so.

    Raises:
      EOFError: the input has ended
      BadInputError: it ended inside the quotation marks
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
    """Stream one answer; Ctrl-C ends it and the conversation keeps its text so far, if any."""
    last, end = None, "\n"
    with StopKey() as key:
        responses = chat.session.stream(text, options=chat.options)
        try:
            for last in responses:
                key.answering = True
                chat.terminal.write(last.text)
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
    finish_answer(chat, last, key.pressed)


def finish_answer(chat: Chat, last: Token | None, stopped: bool) -> None:
    """Count an answer and show its statistics line."""
    note = "stopped" if stopped else None
    if last is None:
        if stopped:
            chat.terminal.note(statistics_line(0, 0.0, 1.0, note))
        return
    chat.totals.add(last)
    if last.finish_reason == "length":
        full = last.generation_tokens < chat.options.max_tokens
        note = (
            f"{CONTEXT_IS_FULL}, /clear begins anew"
            if full
            else "ended by max_tokens, /set max_tokens N allows more"
        )
    if chat.show_statistics:
        rates = (last.generation_tokens, last.generation_tps, last.tokens_per_step)
        shape = shape_note(last.usual_shape, last.usual_nodes)
        chat.terminal.note(statistics_line(*rates, shape, loss_note(chat.options), note))


@contextlib.contextmanager
def line_editing(wanted: bool) -> Iterator[None]:
    """readline with its history from and to our cache folder, as far as there is one."""
    try:
        import readline
    except ImportError:
        wanted = False
    if not wanted:
        yield
        return
    from redrafter_mlx.weights.cache import cache_dir

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
