"""An end to a wait that would be for ever."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_WATCH = """
import os, select, signal, sys
seconds, why = float(sys.argv[1]), sys.argv[2]
try:
    if select.select([sys.stdin], [], [], seconds)[0]:
        sys.exit()
    print(why, file=sys.stderr)
except KeyboardInterrupt:
    pass
os.kill(os.getppid(), signal.SIGKILL)
"""


@contextmanager
def patience(seconds: float, why: str) -> Iterator[None]:
    """End this process with that line if what it does takes longer, or at Ctrl-C.

    A process of its own watches, for MLX connects without letting any thread of Python run.
    """
    command = [sys.executable, "-IS", "-c", _WATCH, str(seconds), f"error: {why}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE):  # whose input ends with this process
        yield
