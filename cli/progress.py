"""Progress of long work: bars on a terminal, a line now and then elsewhere."""

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
    """Bars on stderr below the line `activity`, removed at the end; None off a terminal.

    `describe` puts what is done of how much into words; None describes bytes.
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
    # rich animates nothing on a terminal that is only a pseudo-file for logs.
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bars.add_task(escape(one_line(activity)), total=None)

        def report(label: str, done: int, total: int | None) -> None:
            if label not in tasks:
                tasks[label] = bars.add_task(escape(one_line(label)), total=total)
            visible = total is None or done < total
            bars.update(tasks[label], completed=done, total=total, visible=visible)

        yield report


def describe_bytes(done: int, total: float | None) -> str:
    """`12 MB of 98 MB`, or what is known of it."""
    if not done and not total:
        return ""
    return human_size(done) + (f" of {human_size(int(total))}" if total else "")


def describe_count(done: int, total: float | None) -> str:
    """`3 of 16`."""
    return f"{done} of {int(total)}" if total else ""


@dataclass
class Stage:
    """Progress of one stage of the work.

    unit:  of `done` and `total`; empty for work that is not counted
    clock: seconds since some moment
    """

    activity: str
    unit: str = ""
    total: int | None = None
    clock: Callable[[], float] = time.monotonic
    _done: int = 0
    _note: str = ""
    _began: tuple[int, float] | None = None  # what was done at the first update, and when

    def update(self, done: int, total: int | None = None, note: str = "") -> None:
        """Set how much is done; what was done before the first call counts in no rate."""
        if self._began is None:
            self._began = done, self.clock()
        self._done, self.total, self._note = done, total or self.total, note

    def line(self) -> str:
        """`writing the corpus: 4,000 of 9,000 tokens, 3 texts, about 4 min to go`."""
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
    """Write the stage's line every `every` seconds, from a thread of its own."""
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
    """`about 2 h 5 min`, at least one minute."""
    hours, minutes = divmod(max(1, round(seconds / 60)), 60)
    return f"about {hours} h {minutes} min" if hours else f"about {minutes} min"
