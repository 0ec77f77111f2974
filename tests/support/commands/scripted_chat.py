"""A chat with a scripted model, through a pipe or a pseudo-terminal.

Run as a script, this file is that chat; the terminal tests start it this way.
"""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from screens import FakeModel
from waiting import DEADLINE

from redrafter_mlx.cli.chat.command import Chat, run_chat
from redrafter_mlx.cli.terminal import Terminal
from redrafter_mlx.config import GenerationOptions


def make_chat(terminal: Terminal) -> Chat:
    model = FakeModel()
    return Chat(model, model.session(), GenerationOptions(), terminal)


@dataclass(frozen=True)
class Piped:
    status: int
    out: str
    err: str
    chat: Chat


def piped(*lines: str) -> Piped:
    """Run a chat with these lines as input, whose output is not a terminal."""
    out, err = io.StringIO(), io.StringIO()
    chat = make_chat(Terminal(io.StringIO("".join(f"{x}\n" for x in lines)), out, err, False))
    return Piped(run_chat(chat), out.getvalue(), err.getvalue(), chat)


DOCSTRINGS = (
    '"""What the module does."""', "", "def f():", '    """One line."""', "    return 1", "",
    "def g():", '    """First.', "", "    More.", '    """', '    x = """a', 'b"""', "    return x",
)  # fmt: skip


def questions(chat: Chat) -> list[str]:
    return [m["content"] for m in chat.session.messages if m["role"] == "user"]


CHAT = [sys.executable, __file__]
"""The command of that chat."""


class Typist:
    """Simulates a person at a pseudo-terminal in which the chat runs."""

    def __init__(self, cache: Path) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            # Tests that run in the background may inherit an ignored SIGINT.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            environment = {**os.environ, "REDRAFTER_CACHE": str(cache), "TERM": "xterm"}
            os.execve(sys.executable, CHAT, environment)
        self._new = ""
        self.seen = ""

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def expect(self, text: str, repeat: str = "") -> str:
        """Wait until `text` appears after the text awaited before; return what precedes it.

        `repeat` is typed again every second, because a signal that arrives just before Python's
        readline begins to wait takes effect only with the next one.
        """
        began, repeated = time.monotonic(), 0
        while text not in self._new:
            elapsed = time.monotonic() - began
            assert elapsed < DEADLINE, f"{text!r} did not appear in {self._new!r}"
            if repeat and elapsed > repeated + 1:
                repeated += 1
                self.type(repeat)
            self._read(0.1)
        before, _, self._new = self._new.partition(text)
        return before

    def say(self, line: str, *shown: str) -> None:
        """Type a line; wait for these texts, and then for the next prompt."""
        self.type(f"{line}\n")
        for text in (*shown, ">>> "):
            self.expect(text)

    def leave(self) -> int:
        """Read to the end; return the exit status."""
        until = time.monotonic() + DEADLINE
        while self._read(0.1):
            assert time.monotonic() < until, f"still running: {self._new!r}"
        self.seen += self._new
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._fd)

    def _read(self, seconds: float) -> bool:
        if not select.select([self._fd], [], [], seconds)[0]:
            return True
        try:
            read = os.read(self._fd, 65536).decode(errors="replace")
        except OSError:  # Linux reports this way that the other side has left
            return False
        self._new += read
        self.seen += read
        return read != ""


if __name__ == "__main__":
    import typer

    from redrafter_mlx.cli import main

    @main.app.command("fake-chat")
    def fake_chat() -> None:
        raise typer.Exit(run_chat(make_chat(Terminal.standard())))

    main.tolerate_any_text()
    sys.exit(main.run(["fake-chat"]))
