"""How far a `bench` is."""

from __future__ import annotations

import time

from redrafter_mlx.bench.measure.answers import Answer


class Progress:
    """`37 of 960 · 12 min left · redrafter 2 x 4: 31.4 tok/s`."""

    def __init__(self, size: int, before: int) -> None:
        self.done = before
        self._size, self._before = size, before
        self._began = time.monotonic()
        self._last = ""

    def advance(self, answer: Answer) -> None:
        self.done += 1
        run, method = answer.run, answer.method
        shape = "" if method.beam_width is None else f" {method.beam_width} x {method.beam_length}"
        if run.decode_seconds > 0:
            speed = sum(run.accept_lengths) / run.decode_seconds
            self._last = f" · {method.name}{shape}: {speed:.1f} tok/s"

    def describe(self, done: int, total: float | None) -> str:
        if total is None:
            return ""
        fresh = self.done - self._before
        left = (time.monotonic() - self._began) / fresh * (self._size - self.done) if fresh else 0
        rest = f" · {left / 60:.0f} min left" if left >= 60 else f" · {left:.0f} s left"
        return f"{done} of {int(total)}{rest if fresh else ''}{self._last}"
