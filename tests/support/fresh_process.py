"""A fresh Python process."""

from __future__ import annotations

import os
import subprocess
import sys


def python(code: str, **env: str) -> str:
    """Return what a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
