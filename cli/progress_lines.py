"""What is shown of long work where no terminal shows bars: a line now and then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Stage:
    """How far one stage of the work has come.

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
        """Note how much is done; what was done before the first call counts in no rate."""
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
    """Within, write the stage's line every so many seconds, whether it comes on or not."""
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
    """`about 2 h 5 min`, in minutes at the least."""
    hours, minutes = divmod(max(1, round(seconds / 60)), 60)
    return f"about {hours} h {minutes} min" if hours else f"about {minutes} min"
