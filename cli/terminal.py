"""Standard input, output and error, for people and for pipes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, TextIO

import typer

from redrafter_mlx.config import PLAIN, BeamShape, SamplingParams
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.words import count

if TYPE_CHECKING:
    from rich.console import Console

    from redrafter_mlx.response import Source

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells expect it: 128 + SIGINT."""

CONTEXT_IS_FULL = "ended where the model's context or the memory does"

_BIDI = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_VISIBLE = {
    code: f"^{chr(code ^ 0x40)}" for code in (*range(0x20), 0x7F) if chr(code) not in "\n\t"
}
_VISIBLE |= dict.fromkeys(
    (*range(0x80, 0xA0), *range(0xD800, 0xE000), *map(ord, _BIDI)), "\N{REPLACEMENT CHARACTER}"
)

_LOCAL_FLAGS = 3  # index of the local flags in a terminal's attributes, see `termios`

_STYLES = {"dim": "2", "drafter": "32", "lookup": "4;36"}
"""SGR codes; none for the model's own tokens; underlined where colours may look alike."""


def sanitise(text: str) -> str:
    """Return `text` with every character that could control a terminal made visible.

    C0 and DEL become caret notation (ESC is `^[`); C1, lone surrogates and bidirectional controls
    become U+FFFD. Newline and tab stay. Each character is handled alone, so that an escape sequence
    in pieces is caught as well.
    """
    return text.translate(_VISIBLE)


def styled(text: str, style: str, stream: TextIO) -> str:
    """Return `text` in a style if the stream is a terminal and NO_COLOR is not set."""
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb" or not stream.isatty()
    if plain or not text or style not in _STYLES:
        return text
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"


def one_line(text: str) -> str:
    """Return `text` as a single line that is safe to show."""
    return sanitise(" ".join(text.split()))


def check_text(what: str, text: str) -> str:
    """Return `text`; raises BadInputError if it came from bytes that are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadInputError(f"{what} is not UTF-8 text; convert it first") from None
    return text


def shape_note(
    usual: BeamShape | None,
    nodes: float | None,
    tokens_per_step: float,
    shares: str | None = None,
) -> str | None:
    """Describe shapes that were chosen step by step, for the statistics line.

    nodes:  the number verified per step, not the number that the shape has room for
    shares: of drafted tokens, which a few steps among plain ones may hold, see `shares_line`
    """
    if usual is None or nodes is None:
        return None
    if usual == PLAIN and tokens_per_step > 1:
        return f"tokens from {shares}, most steps plain" if shares else "most steps plain"
    if usual == PLAIN:
        return "decoding plainly: drafting does not pay here"
    return f"mostly W {usual.width}, L {usual.length}, N {nodes:.3g}"


def loss_note(options: SamplingParams) -> str | None:
    """Return a note if the answer's distribution is not the target's, else None."""
    return None if options.lossless else f"{options.method} (not lossless)"


def shares_line(sources: Counter[Source]) -> str | None:
    """Return the shares of drafted tokens, `drafter 45%, lookup 12%`; None if none was drafted."""
    drafted = [(source, n) for source, n in sorted(sources.items()) if source != "model" and n]
    return ", ".join(f"{s} {100 * n / sources.total():.0f}%" for s, n in drafted) or None


def statistics_line(
    tokens: int, tokens_per_second: float, tokens_per_step: float, *notes: str | None
) -> str:
    """Return `128 tokens · 14.2 tok/s · 2.31 tokens/step`, then notes; a rate of 0 is left out."""
    parts = [count(tokens, "token")]
    if tokens_per_second > 0:
        parts.append(f"{tokens_per_second:.1f} tok/s")
    if tokens > 1:
        parts.append(f"{tokens_per_step:.2f} tokens/step")
    return " · ".join([*parts, *filter(None, notes)])


@dataclass
class Terminal:
    """Standard input, output and error."""

    stdin: TextIO
    stdout: TextIO
    stderr: TextIO
    interactive: bool  # whether a person types and reads: prompts are shown, messages on stdout

    @classmethod
    def standard(cls) -> Terminal:
        interactive = sys.stdin.isatty() and sys.stdout.isatty()
        return cls(sys.stdin, sys.stdout, sys.stderr, interactive)

    def read_line(self, prompt: str) -> str:
        """Read the next line, without its end or a byte order mark; EOFError after the last."""
        if self.interactive:
            return input(prompt)
        line = self.stdin.readline()
        if not line:
            raise EOFError
        return line.removeprefix("\ufeff").rstrip("\r\n")

    def write(self, text: str, style: str = "") -> None:
        """Write part of an answer and flush; sanitised on a terminal, unchanged elsewhere."""
        shown = sanitise(text) if self.stdout.isatty() else text
        self.stdout.write(styled(shown, style, self.stdout))
        self.stdout.flush()

    def say(self, text: str) -> None:
        """Print a message: to stdout for a person, to stderr otherwise."""
        stream = self.stdout if self.interactive else self.stderr
        print(sanitise(text), file=stream, flush=True)

    def error(self, message: str) -> None:
        print(f"error: {one_line(message)}", file=self.stderr, flush=True)

    def note(self, text: str) -> None:
        """Print one line on stderr, dimmed if possible."""
        print(styled(one_line(text), "dim", self.stderr), file=self.stderr, flush=True)


@dataclass
class StopKey:
    """Handles Ctrl-C while an answer is generated, or a drafter trained (`answering` throughout).

    Before the first token, Ctrl-C raises KeyboardInterrupt as usual, so that a long prefill stops
    at once. Later it only sets `pressed`, so that the answer ends between two tokens and the
    conversation's cache stays usable; a second Ctrl-C raises. While the turn is being stored
    (`closing`), it only sets `pressed`. `notice` is a line that the first one prints.
    """

    answering: bool = False
    notice: str = ""
    pressed: bool = False
    closing: bool = False
    _before: object = None

    def __enter__(self) -> StopKey:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGINT)
            if self._before is not signal.SIG_IGN:  # which `nohup` sets
                signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._before)  # type: ignore[arg-type]

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        again, self.pressed = self.pressed, True
        if self.notice and not again:
            with contextlib.suppress(OSError, ValueError):  # print may be interrupted itself
                os.write(sys.stderr.fileno(), f"\n{self.notice}\n".encode())
        if not self.closing and (again or not self.answering):
            raise KeyboardInterrupt


@contextlib.contextmanager
def quiet_interrupts(terminal: Terminal) -> Iterator[None]:
    """Keep a person's terminal from writing `^C` into what is printed when Ctrl-C is pressed."""
    try:
        import termios

        before = termios.tcgetattr(terminal.stdin) if terminal.interactive else None
    except (ImportError, OSError, termios.error):
        before = None
    if before is None:
        yield
        return
    quiet = [*before]
    quiet[_LOCAL_FLAGS] &= ~termios.ECHOCTL
    termios.tcsetattr(terminal.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(terminal.stdin, termios.TCSANOW, before)


def confirm(question: str) -> None:
    """Ask a person at a terminal, whose no ends the command; ask nobody elsewhere."""
    if sys.stdin.isatty() and sys.stderr.isatty():
        typer.confirm(question, abort=True, err=True)


def console() -> Console:
    """Return a console for tables; in a pipe it is 200 columns wide, so that no cell is folded."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 200)


def open_missing_streams() -> None:
    """Open the null device for each standard stream that the caller closed (`>&-`).

    Python sets such a stream to None, and the next opened file would get its descriptor.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def tolerate_any_text() -> None:
    """Let the standard streams carry any text: invalid bytes cause our error, not Python's."""
    for stream, errors in (
        (sys.stdin, "surrogateescape"),
        (sys.stdout, "replace"),
        (sys.stderr, "backslashreplace"),
    ):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors=errors)  # type: ignore[union-attr]
