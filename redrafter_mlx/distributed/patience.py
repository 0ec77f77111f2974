"""An end to a wait that would be for ever."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_WATCH = """
import os, select, signal, sys
parent, seconds, why = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
try:
    if select.select([sys.stdin], [], [], seconds)[0]:
        sys.exit()
    print(why, file=sys.stderr)
except KeyboardInterrupt:
    pass
if os.getppid() == parent:
    os.kill(parent, signal.SIGKILL)
"""


@contextmanager
def patience(seconds: float, why: str) -> Iterator[None]:
    """End this process with that line if what it does takes longer, or at Ctrl-C.

    A process of its own watches, for MLX connects without letting any thread of Python run.
    """
    given = (str(os.getpid()), str(seconds), f"error: {why}")
    command = [sys.executable, "-IS", "-c", _WATCH, *given]
    with subprocess.Popen(command, stdin=subprocess.PIPE):  # whose input ends with this process
        yield
