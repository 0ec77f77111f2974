"""Kept answers for tests, and what child processes do with them."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

from redrafter_mlx.learning.kept_texts import KeptText, TextStore


def some_text(number: int, length: int = 30) -> KeptText:
    """Return a text of random tokens, whose time is its number."""
    rng = random.Random(number)
    tokens = tuple(rng.randrange(50_000) for _ in range(length))
    return KeptText(tokens[: length // 3], tokens[length // 3 :], 0.5 * (number % 2), float(number))


def append_many(folder: Path, first: int, count: int) -> None:
    store = TextStore(folder)
    for i in range(count):
        store.append(some_text(first + i))


def write_and_be_killed(folder: Path, count: int) -> None:
    append_many(folder, 0, count)
    os.kill(os.getpid(), signal.SIGKILL)
