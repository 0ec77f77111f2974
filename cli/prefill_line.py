"""The line that shows how much of a long prompt was read."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress

_PATIENCE = 1.0
"""Seconds without a token after which the line appears."""


class PrefillLine:
    """Shows on a terminal that a prompt is being read, from its second second until `erase`.

    As a context manager it is erased at the end. Any thread may call its methods.
    """

    def __init__(self, stream: TextIO) -> None:
        """`stream`: where it appears; if that is not a terminal, it never does."""
        self._stream = stream
        self._lock = threading.Lock()
        self._bars: Progress | None = None
        self._amount: tuple[int, int] | None = None  # tokens read, and their total
        self._over = not stream.isatty()
        self._timer = threading.Timer(_PATIENCE, self._show)
        self._timer.daemon = True

    def __enter__(self) -> PrefillLine:
        if not self._over:
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.erase()

    def update(self, read: int, total: int) -> None:
        """Set the number of prompt tokens that were read, and their total number."""
        with self._lock:
            self._amount = read, total
            self._refresh()

    def erase(self) -> None:
        """Remove the line; it does not appear again."""
        with self._lock:
            self._over = True
            self._timer.cancel()
            bars, self._bars = self._bars, None
            if bars is not None:
                bars.stop()

    def _show(self) -> None:
        from rich import progress as rich
        from rich.console import Console

        columns = (rich.SpinnerColumn(), rich.TextColumn("{task.description}"), rich.BarColumn(24))
        with self._lock:
            if self._over:
                return
            console = Console(file=self._stream)
            self._bars = rich.Progress(*columns, console=console, transient=True)
            self._bars.add_task("waiting for the first token", total=None)
            self._refresh()
            self._bars.start()

    def _refresh(self) -> None:
        if self._bars is not None and self._amount is not None:
            read, total = self._amount
            described = f"reading the prompt: {read:,} of {total:,} tokens"
            self._bars.update(
                self._bars.task_ids[0], description=described, completed=read, total=total
            )
