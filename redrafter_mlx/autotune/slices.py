"""Measuring this machine while it is in use: one small measurement after an answer, now and then.

Each one must have been saved up for as a small share of the time that answers took. What was
measured is kept on disk, so that it is measured once, over as many processes as it takes.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time

from redrafter_mlx.autotune.assumed import SHORT_CONTEXT, Timed, assumed_curves, to_time
from redrafter_mlx.autotune.cost_model import CostCurves, Setup
from redrafter_mlx.autotune.profiler import drafting_call, seconds_of, verification_call
from redrafter_mlx.config import BeamShape
from redrafter_mlx.drafting.interface import Proposer
from redrafter_mlx.runtime.atomic_write import write_whole
from redrafter_mlx.runtime.blas import BLAS
from redrafter_mlx.runtime.device import backend
from redrafter_mlx.target.model import Target

SHARE = 0.02
"""Of the time that answers take, how much measuring may take."""

_REPEATS = 3
_CALLS = 2 * (_REPEATS + 1)
"""What one measurement takes at most, in calls of the target: the first one compiles."""


class SlicedMeasurement:
    """Times of calls and drafts, taken one by one as the time for it has been earned.

    finished: whether nothing is left to measure
    """

    def __init__(
        self, target: Target, proposer: Proposer | None, setup: Setup, widest: int, on_disk: bool
    ) -> None:
        self._target = target
        self._proposer = proposer
        self._setup = setup
        self._widest = 0 if proposer is None else widest
        self._path = setup.path.with_suffix(".slices.json") if on_disk else None
        self._timed: dict[Timed, float] = {}
        self._credit = 0.0
        self._load()

    @property
    def finished(self) -> bool:
        return not self._left()

    def curves(self) -> CostCurves:
        """What has been measured so far, the rest assumed."""
        return assumed_curves(self._setup, backend(), self._timed, self._widest)

    def earn(self, seconds: float, step: float) -> None:
        """Take one measurement at most, if answers have earned it.

        Args:
          seconds: of the answer that has just ended
          step: seconds of one of its steps
        """
        if self.finished:
            return
        price = _CALLS * step
        self._credit = min(self._credit + SHARE * seconds, price)
        if self._credit >= price:
            case = self._left()[0]
            began = time.perf_counter()
            with BLAS.threads_by_rows():
                self._timed[case] = self._time(case)
            self._credit -= time.perf_counter() - began
        self._save()

    def _left(self) -> list[Timed]:
        return [case for case in to_time(self._widest) if case not in self._timed]

    def _time(self, case: Timed) -> float:
        kind, first, second = case
        if kind == "call":
            call = verification_call(self._target, self._target.new_cache(), first, SHORT_CONTEXT)
        else:
            assert self._proposer is not None
            call = drafting_call(self._target, self._proposer, BeamShape(first, second))
        seconds_of(self._target, call, 1)  # compiles kernels
        return statistics.median(seconds_of(self._target, call, 1) for _ in range(_REPEATS))

    def _load(self) -> None:
        """What is on disk; a damaged file counts as none."""
        if self._path is None:
            return
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            stored = json.loads(self._path.read_text(encoding="utf-8"))
            timed = {(str(k), int(a), int(b)): float(s) for k, a, b, s in stored["timed"]}
            credit = float(stored["credit"])
            if all(0 < seconds < 1e3 for seconds in timed.values()):
                self._timed, self._credit = timed, credit

    def _save(self) -> None:
        """Keep it for the next process; a cache that cannot be written is no error."""
        if self._path is None:
            return
        record = {"timed": [[*case, s] for case, s in self._timed.items()], "credit": self._credit}
        with contextlib.suppress(OSError):
            write_whole(self._path, json.dumps(record))
