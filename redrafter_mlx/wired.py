"""Memory that stays resident on Metal while answers are being decoded."""

from __future__ import annotations

import contextlib
import sys
import threading

import mlx.nn as nn
from mlx_lm.generate import wired_limit


class WiredMemory:
    """mlx-lm's `wired_limit` for as long as at least one answer is being decoded."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._users = 0
        self._lock = threading.Lock()
        self._limit = contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                # mlx-lm prints its warning about large models; standard output is the answer's.
                with contextlib.redirect_stdout(sys.stderr):
                    self._limit.enter_context(wired_limit(self._model))
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._limit.close()
