"""A machine that stays awake while long work is done."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator


@contextlib.contextmanager
def kept_awake() -> Iterator[None]:
    """Within, macOS does not sleep on mains power (`caffeinate`); elsewhere nothing is done."""
    program = shutil.which("caffeinate")
    if program is None:
        yield
        return
    watch = subprocess.Popen(
        [program, "-i", "-s", "-w", str(os.getpid())], stdin=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        watch.terminate()
        watch.wait()
