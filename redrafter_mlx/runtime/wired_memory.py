"""Wired memory: what stays resident on Metal while answers are generated."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

import mlx.nn as nn
from mlx_lm.generate import wired_limit


class WiredMemory:
    """mlx-lm's `wired_limit`, in force while at least one answer is being generated."""

    def __init__(self) -> None:
        self._users = 0
        self._lock = threading.Lock()
        self._limit = contextlib.ExitStack()

    @contextlib.contextmanager
    def held(self, model: nn.Module) -> Iterator[None]:
        """Keep memory resident while an answer of `model` is being generated."""
        with self._lock:
            if self._users == 0:
                # mlx-lm prints its warning about large models; standard output is for the answer.
                with contextlib.redirect_stdout(sys.stderr):
                    self._limit.enter_context(wired_limit(model))
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._limit.close()


WIRED_MEMORY = WiredMemory()
"""One instance per process, because the limit is per process: all models share the user count."""
