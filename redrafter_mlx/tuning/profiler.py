"""Profiler: times the target's calls and the drafting on this machine.

No answer waits for it: now and then one small measurement is taken after an answer, paid for by a
small share of the time that answers took. `measure_all` takes all of them at once instead, with
interleaved repeats, so that a machine that becomes slower or busier does so for all of them.

As in the decoding loop, a call follows one like it, which leaves buffers that fit, and several
short calls are submitted at once, so that the time that a single call waits for the host is not
counted.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from redrafter_mlx.config import BeamShape
from redrafter_mlx.drafting.interface import Drafter
from redrafter_mlx.target_model.kv_cache import TreeCache
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.tuning.cost_model import (
    BATCH_LENGTHS,
    BATCH_ROWS,
    BATCHES,
    DRAFT_LENGTHS,
    FEW_ROWS,
    LONG_ROWS,
    MOST_NODES,
    ROWS,
)
from redrafter_mlx.tuning.overheads import measure_overheads
from redrafter_mlx.tuning.timed_calls import (
    Call,
    drafting_call,
    next_seconds,
    seconds_of,
    verification_call,
)
from redrafter_mlx.tuning.timings import (
    LONG_CONTEXT,
    SHORT_CONTEXT,
    Case,
    Timings,
    raise_overheads,
)

SHARE = 0.02
"""Share of the answers' time that measuring may take."""

_REPEATS = 3
_PRICE = 2 * (_REPEATS + 1)
"""Maximum cost of one measurement, in steps: its first call compiles."""

_BUDGET = 6.0
"""Seconds for the first call of every case, again for repeats, and again for overheads."""

_LEAST_ROUNDS, _MOST_ROUNDS = 2, 9
"""Limits of the repeats of every case. The shortest is used: other work on the machine only adds
time."""

_SETTLED, _PATIENCE = 0.98, 4
"""On a busy machine, the repeats go on for up to _PATIENCE times their budget, until a round leaves
the shortest times at _SETTLED of what they were, on average."""

_DOUBTFUL, _MOST_DOUBTS = 1.1, 8
"""A call that seems to take this much longer than one with more rows is repeated, so many times at
most: a machine that was busy for its few repeats would rule out its row count."""

_TAKEN = 2
"""Number of measurements of a case, after different answers: one may be taken while the machine is
busy, and the shortest is kept for all later processes."""


class Profiler:
    """Measures the times of one target and its drafter.

    timings: the times measured so far
    batch:   largest batch decoded so far; the cases of batches are measured up to its size
    """

    def __init__(
        self, target: Target, drafter: Drafter | None, timings: Timings, widest: int
    ) -> None:
        """`widest`: maximum number of beams drafted for a sequence, 0 without a drafter."""
        self.timings = timings
        self.batch = 1
        self._target, self._drafter, self._widest = target, drafter, widest

    def cases(self) -> list[Case]:
        """Return the cases to measure, the most informative first."""
        calls: list[Case] = [("call", rows, SHORT_CONTEXT) for rows in FEW_ROWS]
        more: list[Case] = [("call", rows, SHORT_CONTEXT) for rows in ROWS if rows not in FEW_ROWS]
        long: list[Case] = [("call", rows, LONG_CONTEXT) for rows in LONG_ROWS]
        widths = range(1, self._widest + 1)
        drafts: list[Case] = [("draft", w, n) for n in self._drafted(DRAFT_LENGTHS) for w in widths]
        few = 2 * len(widths)
        alone = [*calls[:4], *drafts[:few], *calls[4:], *long, *drafts[few:], *more]
        return [*alone, *self._batch_cases()]

    def _batch_cases(self) -> list[Case]:
        """Return the cases that only batches need."""
        if self.batch == 1:
            return []
        rows = [rows for rows in BATCH_ROWS if rows <= MOST_NODES * self.batch]
        calls: list[Case] = [("call", r, SHORT_CONTEXT) for r in rows]
        beams = [self._widest * b for b in BATCHES if self._widest and b < 2 * self.batch]
        drafts: list[Case] = [("draft", b, n) for n in self._drafted(BATCH_LENGTHS) for b in beams]
        return [*drafts, *calls]

    def _drafted(self, lengths: Sequence[int]) -> list[int]:
        """Return these lengths, cut to what the drafter can draft, each once."""
        most = None if self._drafter is None else self._drafter.max_length
        return sorted({n if most is None else min(n, most) for n in lengths})

    @property
    def finished(self) -> bool:
        """Whether nothing is left to measure after answers."""
        return self._next() is None

    def after_answer(self, seconds: float, step: float) -> bool:
        """Take at most one measurement, if the budget allows it; return whether it was taken.

        Args:
          seconds: seconds of the answer that has just ended
          step: seconds of one of its steps
        """
        case = self._next()
        if case is None:
            return False
        price = _PRICE * step
        self.timings.budget = min(self.timings.budget + SHARE * seconds, price)
        if self.timings.budget < price:
            return False
        timings, began = self.timings, time.perf_counter()
        try:
            with self._target.in_use():
                call = self._call(case, {})
                seconds_of(self._target, call, 1)  # compiles kernels
                times = [seconds_of(self._target, call, 1) for _ in range(_REPEATS)]
        finally:
            spent = time.perf_counter() - began  # hours, if the machine slept meanwhile
            timings.budget = max(timings.budget - spent, -price)
        timings.seconds[case] = min(timings.seconds.get(case, math.inf), *times)
        timings.taken[case] = timings.taken.get(case, 0) + 1
        return True

    def measure_all(
        self, done: Callable[[float], None] | None = None, budget: float = _BUDGET
    ) -> Timings:
        """Measure all cases now; on a slow machine, the most informative half of them.

        If only cases of batches were missing, the shorter ones of all earlier times are kept: other
        work on the machine only adds time.

        Args:
          done: called now and then with the finished share
          budget: seconds for first calls, again for repeats, and again for overheads
        """
        tell = done or (lambda _: None)
        with self._target.in_use():
            times = self._times(tell, budget)
        seconds = {case: min(t) for case, t in times.items()}
        spreads = [(max(t) - min(t)) / max(seconds[case], 1e-9) for case, t in times.items()]
        timings = Timings(
            setup=self.timings.setup,
            seconds=seconds,
            taken=dict.fromkeys(seconds, _TAKEN),
            spread=statistics.median(spreads),
            complete=True,
        )
        known = self.timings.seconds if self.timings.complete and not self.finished else {}
        for case in seconds.keys() & known.keys():
            seconds[case] = min(seconds[case], known[case])
        overheads = {case: s for case, s in known.items() if case[0] == "overhead"}
        seconds |= overheads or self._overheads(seconds, budget)
        raise_overheads(seconds)
        tell(1.0)
        self.timings = timings
        return timings

    def _next(self) -> Case | None:
        cases = self._batch_cases() if self.timings.complete else self.cases()
        taken = self.timings.taken
        return next((case for case in cases if taken.get(case, 0) < _TAKEN), None)

    def _call(self, case: Case, caches: dict[int, TreeCache]) -> Call:
        """Return a call to time; calls at one context share a cache."""
        kind, first, second = case
        if kind == "draft":
            assert self._drafter is not None
            batch = -(-first // self._widest)
            shape = BeamShape(first // batch, second)
            return drafting_call(self._target, self._drafter, shape, batch)
        if second not in caches:
            caches[second] = self._target.new_cache()
        return verification_call(self._target, caches[second], first, second)

    def _overheads(self, seconds: Mapping[Case, float], budget: float) -> dict[Case, float]:
        caches: dict[int, TreeCache] = {}
        one_row = seconds["call", 1, SHORT_CONTEXT]
        call = partial(self._call, caches=caches)
        return measure_overheads(self._target, self._drafter, self._widest, call, one_row, budget)

    def _times(self, tell: Callable[[float], None], budget: float) -> dict[Case, list[float]]:
        """Measure the seconds of each case, interleaved."""
        calls: dict[Case, Call] = {}
        times: dict[Case, list[float]] = {}
        caches: dict[int, TreeCache] = {}
        cases = self.cases()
        began = time.perf_counter()
        for i, case in enumerate(cases):
            if 2 * i >= len(cases) and time.perf_counter() - began > budget:
                break
            calls[case] = self._call(case, caches)
            times[case] = [seconds_of(self._target, calls[case], 1)]
            tell(i / len(cases) / 2)
        if time.perf_counter() - began > 2 * budget:
            return times  # repeats would take minutes: the first calls are the measurement
        began = time.perf_counter()
        for done in range(1, _MOST_ROUNDS + 1):
            for case, call in calls.items():
                times[case].append(next_seconds(self._target, call))
            spent = time.perf_counter() - began
            tell(0.5 + max(done / _MOST_ROUNDS, min(spent / (_PATIENCE * budget), 1.0)) / 2)
            if done < _LEAST_ROUNDS:
                continue
            limit = budget if _settled(times) else _PATIENCE * budget
            if spent * (done + 1) / done > limit:
                break
        times = {case: t[1:] for case, t in times.items()}  # the first one compiled kernels
        for _ in range(_MOST_DOUBTS):
            for case in _doubted(times):
                times[case].append(next_seconds(self._target, calls[case]))
        return times


def _settled(times: Mapping[Case, Sequence[float]]) -> bool:
    """Whether the last repeat of each case hardly lowered the shortest times.

    The first call compiles, so it does not count.
    """
    ratios = [min(t[1:]) / max(min(t[1:-1]), 1e-9) for t in times.values()]
    return statistics.fmean(ratios) >= _SETTLED


def _doubted(times: Mapping[Case, Sequence[float]]) -> list[Case]:
    """Return the calls that seem to take clearly longer than another with more rows."""
    calls = {case: min(t) for case, t in times.items() if case[0] == "call"}
    return [
        (kind, rows, context)
        for (kind, rows, context), seconds in calls.items()
        if any(
            n > rows and there == context and seconds > _DOUBTFUL * other
            for (_, n, there), other in calls.items()
        )
    ]
