"""Progress of long work: bars on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from redrafter_mlx.cli.terminal import one_line
from redrafter_mlx.runtime.paths import human_size
from redrafter_mlx.weights import Progress

if TYPE_CHECKING:
    from rich.progress import Task, TaskID


@contextmanager
def progress_bars(
    activity: str, describe: Callable[[int, float | None], str] | None = None
) -> Iterator[Progress | None]:
    """Show bars on stderr below the line `activity` until the end; yields None off a terminal.

    `describe` turns the done and total amounts into text; by default they are bytes.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress as rich
    from rich.console import Console
    from rich.markup import escape
    from rich.text import Text

    in_words = describe or describe_bytes

    class Amount(rich.ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(in_words(int(task.completed), task.total))

    columns = (rich.SpinnerColumn(), rich.TextColumn("{task.description}"), rich.BarColumn(24),
               Amount())  # fmt: skip
    tasks: dict[str, TaskID] = {}
    # rich does not animate on a pseudo-terminal that only collects logs.
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bars.add_task(escape(one_line(activity)), total=None)

        def report(label: str, done: int, total: int | None) -> None:
            if label not in tasks:
                tasks[label] = bars.add_task(escape(one_line(label)), total=total)
            visible = total is None or done < total
            bars.update(tasks[label], completed=done, total=total, visible=visible)

        yield report


def describe_bytes(done: int, total: float | None) -> str:
    """Return text such as `12 MB of 98 MB`, or the known part of it."""
    if not done and not total:
        return ""
    return human_size(done) + (f" of {human_size(int(total))}" if total else "")


def describe_count(done: int, total: float | None) -> str:
    """Return text such as `3 of 16`."""
    return f"{done} of {int(total)}" if total else ""


@dataclass
class Stage:
    """Progress of one stage of the work.

    unit:  unit of `done` and `total`; empty for work that is not counted
    clock: seconds since some moment
    """

    activity: str
    unit: str = ""
    total: int | None = None
    clock: Callable[[], float] = time.monotonic
    _done: int = 0
    _note: str = ""
    _began: tuple[int, float] | None = None  # amount at the first update, and its time

    def update(self, done: int, total: int | None = None, note: str = "") -> None:
        """Set the amount done; the rate excludes what was done before the first call."""
        if self._began is None:
            self._began = done, self.clock()
        self._done, self.total, self._note = done, total or self.total, note

    def line(self) -> str:
        """Return e.g. `writing the corpus: 4,000 of 9,000 tokens, 3 texts, about 4 min to go`."""
        if not self.unit:
            return f"{self.activity} ..."
        whole = "" if self.total is None else f" of {self.total:,}"
        parts = [f"{self.activity}: {self._done:,}{whole} {self.unit}", self._note, self._to_go()]
        return ", ".join(filter(None, parts))

    def _to_go(self) -> str:
        before, began = self._began or (0, 0.0)
        if self.total is None or self._done <= before:
            return "time to go not known yet"
        seconds = (self.clock() - began) * (self.total - self._done) / (self._done - before)
        return f"{duration(seconds)} to go"


@contextmanager
def progress_lines(
    stage: Stage, write: Callable[[str], object], every: float = 30.0
) -> Iterator[None]:
    """Write the stage's line every `every` seconds, from a separate thread."""
    left = threading.Event()

    def tell() -> None:
        while not left.wait(every):
            write(stage.line())

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        left.set()
        teller.join()


def duration(seconds: float) -> str:
    """Return text such as `about 2 h 5 min`; at least one minute."""
    hours, minutes = divmod(max(1, round(seconds / 60)), 60)
    return f"about {hours} h {minutes} min" if hours else f"about {minutes} min"
