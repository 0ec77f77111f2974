"""Child processes that end with their parent, however the parent ends, and say why they fail.

A child of `multiprocessing` can wait for its parent: it holds one end of a pipe, the parent alone
holds the other, and the system closes that end when the parent ends. The waiting thread needs the
GIL, which a library may hold for a while. So on Linux the system is also asked to end the child.
"""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from redrafter_mlx.errors import RedrafterError, device_failure

_PR_SET_PDEATHSIG = 1
"""From Linux's <sys/prctl.h>."""


Send = Callable[[object], None]


@dataclass(frozen=True)
class _Failure:
    """The line in which a child's error is described."""

    line: str


@dataclass(frozen=True)
class Child:
    """A child process, and the end of the pipe on which it sends."""

    process: BaseProcess
    _received: Connection

    def check(self) -> list[Any]:
        """Return what it has sent since the last call.

        Raises RedrafterError, in one line, if it failed or was ended.
        """
        # Asked first: what it sent before it ended is received below.
        status, sent = self.process.exitcode, []
        try:
            while self._received.poll():
                message = self._received.recv()
                if isinstance(message, _Failure):
                    raise RedrafterError(message.line)
                sent.append(message)
        except (EOFError, OSError):  # it has ended
            pass
        if status is not None and status < 0:
            how = signal.Signals(-status).name
            out = ", which the system sends if memory is short" if how == "SIGKILL" else ""
            raise RedrafterError(f"a process was ended by {how}{out}")
        if status:
            raise RedrafterError(f"a process ended with status {status}")
        return sent


def start_child(function: Callable[..., None], *arguments: object) -> Child:
    """Call a function in a new process that ignores Ctrl-C; the parent must end it.

    Its first argument is a function that sends what can be pickled to the parent.
    """
    work = pickle.dumps((function, arguments))
    context = mp.get_context("spawn")
    received, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(work, sender), daemon=True)
    resource_tracker.ensure_running()  # starting it would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # the child inherits it
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        sender.close()
    return Child(process, received)


def _run(work: bytes, sender: Connection) -> None:
    """The child's main function. It watches the parent before it unpickles, and so imports."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        function, arguments = pickle.loads(work)
        function(sender.send, *arguments)
    except Exception as error:
        sender.send(_Failure(_described(error)))
        sys.exit(1)


def _described(error: Exception) -> str:
    """Return one line for an error, with its place in the code if no user can cause it."""
    if isinstance(error, RedrafterError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    known = device_failure(error)
    if known is not None:
        return known
    text = " ".join(f"{type(error).__name__}: {error}".split())
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{text} ({os.path.basename(last.filename)}, line {last.lineno})"


def _end_with_parent() -> None:
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
