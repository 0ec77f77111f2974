"""A time limit on a wait that could last for ever."""

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
    """Kill this process, after printing `why`, if the body takes longer; kill it at Ctrl-C too.

    A separate process watches, because no Python thread can run while MLX connects.
    """
    given = (str(os.getpid()), str(seconds), f"error: {why}")
    command = [sys.executable, "-IS", "-c", _WATCH, *given]
    with subprocess.Popen(command, stdin=subprocess.PIPE):  # its input closes with the body
        yield
