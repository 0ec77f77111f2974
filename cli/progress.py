"""Progress of long work: bars on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

from redrafter_mlx.cli.terminal import one_line
from redrafter_mlx.runtime.files.paths import human_size
from redrafter_mlx.weights import Progress, log_progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import Task, TaskID


_EVERY = 30.0  # seconds between the lines that stand for bars where stderr is no terminal


_PATIENCE = 1.0  # seconds without a token after which the line appears


@contextmanager
def progress_bars(
    activity: str,
    describe: Callable[[int, int], str] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Progress]:
    """Show bars on stderr below the line `activity` until the end; elsewhere lines now and then.

    describe: turns the done and total amounts into text; without it they are bytes, of which large
    downloads and what takes long are logged
    """
    if not sys.stderr.isatty():
        yield log_progress() if describe is None else _occasional_lines(activity, describe, clock)
        return
    from rich import progress as rich
    from rich.console import Console
    from rich.table import Column
    from rich.text import Text

    in_words = describe or (lambda done, total: f"{human_size(done)} of {human_size(total)}")

    class Label(rich.ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(task.description, no_wrap=True, overflow="ellipsis")

    class Amount(rich.ProgressColumn):
        def render(self, task: Task) -> Text:
            done = int(task.completed)
            if task.total is None:
                return Text(human_size(done) if done else "")
            return Text(in_words(done, int(task.total)))

    # In a narrow terminal the labels and the bars shrink: columns that could wrap do so first.
    columns = (rich.SpinnerColumn(table_column=Column(no_wrap=True)), Label(), rich.BarColumn(24),
               Amount(Column(no_wrap=True)))  # fmt: skip
    tasks: dict[str, TaskID] = {}
    # rich does not animate on a pseudo-terminal that only collects logs.
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bars.add_task(one_line(activity), total=None)

        def report(label: str, done: int, total: int | None) -> None:
            if label not in tasks:
                tasks[label] = bars.add_task(one_line(label), total=total, completed=done)
            visible = total is None or done < total
            bars.update(tasks[label], completed=done, total=total, visible=visible)

        yield report


def _occasional_lines(
    activity: str, describe: Callable[[int, int], str], clock: Callable[[], float]
) -> Progress:
    """Return a callback that writes a line to stderr at most every _EVERY seconds."""
    written = clock()

    def report(label: str, done: int, total: int | None) -> None:
        nonlocal written
        if clock() - written >= _EVERY and total is not None:
            written = clock()
            amount = one_line(f"{activity}: {label}, {describe(done, total)}")
            print(amount, file=sys.stderr, flush=True)

    return report


def describe_count(done: int, total: int) -> str:
    """Return text such as `3 of 16`."""
    return f"{done} of {total}"


@dataclass
class Stage:
    """Progress of one stage of the work."""

    activity: str
    unit: str = ""  # unit of `done` and `total`; empty for work that is not counted
    total: int | None = None
    clock: Callable[[], float] = time.monotonic  # seconds since some moment
    _done: int = 0
    _note: str = ""
    _began: tuple[int, float] | None = None  # amount at the first update, and its time
    _entered: float = field(init=False)

    def __post_init__(self) -> None:
        self._entered = self.clock()

    def update(self, done: int, total: int | None = None, note: str = "") -> None:
        """Set the amount done; the rate excludes what was done before the first call."""
        if self._began is None:
            self._began = done, self.clock()
        self._done, self.total, self._note = done, total or self.total, note

    def line(self) -> str:
        """Return e.g. `writing the corpus: 4,000 of 9,000 tokens, 3 texts, about 4 min to go`.

        Where the time to go is not known, it has the time so far: no line is that before it.
        """
        so_far = f"{self.clock() - self._entered:.0f} s so far"
        if not self.unit:
            return f"{self.activity} ... {so_far}"
        whole = "" if self.total is None else f" of {self.total:,}"
        to_go = f"{so_far}, time to go not known yet"
        before, began = self._began or (0, 0.0)
        if self.total is not None and self._done > before:
            seconds = (self.clock() - began) * (self.total - self._done) / (self._done - before)
            to_go = f"{duration(seconds)} to go"
        parts = [f"{self.activity}: {self._done:,}{whole} {self.unit}", self._note, to_go]
        return ", ".join(filter(None, parts))


@contextmanager
def progress_lines(
    stage: Stage, write: Callable[[str], object], every: float = _EVERY
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


class PrefillLine:
    """Shows on a terminal that a prompt is being read, from its second second until `erase`.

    As a context manager it is erased at the end. Any thread may call its methods.
    """

    def __init__(self, stream: TextIO) -> None:
        """It appears on `stream`, if that is a terminal."""
        self._stream = stream
        self._lock = threading.Lock()
        self._bars: Bars | None = None
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
