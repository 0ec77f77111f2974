"""How a caller is told of long work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from redrafter_mlx.weights import Progress

Activity = Callable[[str, Callable[[int, int], str] | None], AbstractContextManager[Progress]]
"""Begins an activity with this name; the function turns the done and total amounts into text."""


@contextmanager
def silent(name: str, describe: Callable[[int, int], str] | None = None) -> Iterator[Progress]:
    """Tell nobody."""
    del name, describe
    yield lambda *_: None
