"""What is shown of loading and downloading: bars on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from redrafter_mlx.cli.terminal import one_line

if TYPE_CHECKING:
    from rich.progress import Task, TaskID

Report = Callable[[str, int, "int | None"], None]
"""Takes (label, bytes done, bytes in all or None); the library calls it `Progress`."""


@contextmanager
def progress_bars(
    activity: str, describe: Callable[[int, float | None], str] | None = None
) -> Iterator[Report | None]:
    """Bars on stderr below a line that says `activity`, gone at the end; None off a terminal.

    `describe` puts what is done into words; bytes if it is left out.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn
    from rich.text import Text

    in_words = describe or describe_bytes

    class Amount(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(in_words(int(task.completed), task.total))

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(24), Amount())
    console = Console(stderr=True)
    tasks: dict[str, TaskID] = {}
    # A terminal that is only a pseudo-file for logs gets no animation from rich either.
    with Progress(*columns, console=console, transient=True) as bars:
        bars.add_task(escape(one_line(activity)), total=None)

        def report(label: str, done: int, total: int | None) -> None:
            if label not in tasks:
                tasks[label] = bars.add_task(escape(one_line(label)), total=total)
            bars.update(tasks[label], completed=done, total=total)
            if total is not None and done >= total:
                bars.update(tasks[label], visible=False)

        yield report


def describe_bytes(done: int, total: float | None) -> str:
    """`12 MB of 98 MB`, or what is known of it."""
    from redrafter_mlx.runtime.paths import human_size

    if not done and not total:
        return ""
    return human_size(done) + (f" of {human_size(int(total))}" if total else "")


def describe_count(done: int, total: float | None) -> str:
    """`3 of 16`."""
    return f"{done} of {int(total)}" if total else ""
