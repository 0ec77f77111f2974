"""Keep the machine awake during long work."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator


@contextlib.contextmanager
def kept_awake() -> Iterator[None]:
    """Keep macOS awake on mains power (`caffeinate`); do nothing on other systems.

    Its option -s holds on mains power only; -i would drain a battery too.
    """
    program = shutil.which("caffeinate")
    if program is None:
        yield
        return
    watch = subprocess.Popen([program, "-s", "-w", str(os.getpid())], stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        watch.terminate()
        watch.wait()
