"""Profile: times the target's calls, the drafting and whole steps on this machine.

All are measured in turns, so that a machine that becomes slower or busier does so for all of them.
As in the decoding loop, a call follows one like it, which leaves buffers that fit, and several
short calls are submitted at once, so that the time that a single call waits for the host is not
counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from redrafter_mlx.config import BeamShape
from redrafter_mlx.drafting.interface import Drafter
from redrafter_mlx.target_model.kv_cache import TreeCache
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.tuning.cost import FEW_ROWS, MAX_NODES, OVERHEADS
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
    MAX_SPREAD,
    SHORT_CONTEXT,
    Case,
    Setup,
    Timings,
)

ROWS, LONG_ROWS = (*range(1, 18), 20, 24, 28, 32), (1, 8, 16, 32)
"""Query rows of the timed calls at the two contexts; only attention depends on the context."""

DRAFT_LENGTHS = (2, 4, 8)
"""Beam lengths at which drafting is timed; each further level repeats the same work."""

BATCH_ROWS, BATCHES, BATCH_LENGTHS = (40, 48, 64, 96, 128), (2, 4, 8), (2, 4)
"""Query rows that only batches reach; their sizes and beam lengths at which drafting is timed."""

_BUDGET, _PATIENCE = 12.0, 4
"""Seconds for the first call of every case, again for repeats, and again for overheads; and how
often that time the repeats may take while they differ too much: `tune` takes a minute on a quiet
machine and three on a busy one (test_tune)."""

_ROUNDS, _MAX_ROUNDS = 3, 9
"""Minimum number of repeats, which is how many of the last ones must agree, and the maximum once
they do. The shortest is used: other work on the machine only adds time."""

_DOUBTFUL, _MAX_DOUBTS = 1.1, 8
"""A call that seems to take this much longer than one with more rows is repeated, so many times at
most: a machine that was busy for its few repeats would rule out its row count."""


class Profiler:
    """Measures the times of one target and its drafter."""

    def __init__(self, target: Target, drafter: Drafter | None, widest: int) -> None:
        """`widest`: maximum number of beams drafted for a sequence, 0 without a drafter."""
        self._target, self._drafter, self._widest = target, drafter, widest

    def cases(self, batch: int = 1) -> list[Case]:
        """Return the cases to measure for batches of up to `batch`, the most informative first."""
        calls: list[Case] = [("call", rows, SHORT_CONTEXT) for rows in FEW_ROWS]
        more: list[Case] = [("call", rows, SHORT_CONTEXT) for rows in ROWS if rows not in FEW_ROWS]
        long: list[Case] = [("call", rows, LONG_CONTEXT) for rows in LONG_ROWS]
        widths, lengths = range(1, self._widest + 1), self._drafted(DRAFT_LENGTHS)
        drafts: list[Case] = [("draft", w, n) for n in lengths for w in widths]
        found = [*calls, *drafts, *long, *more]
        if batch > 1:
            beams = [self._widest * b for b in BATCHES if self._widest and b < 2 * batch]
            found += [("draft", b, n) for n in self._drafted(BATCH_LENGTHS) for b in beams]
            rows = [rows for rows in BATCH_ROWS if rows <= MAX_NODES * batch]
            found += [("call", r, SHORT_CONTEXT) for r in rows]
        return found

    def measure(
        self,
        known: Timings,
        batch: int = 1,
        done: Callable[[float], None] | None = None,
        budget: float = _BUDGET,
    ) -> Timings:
        """Measure all cases now; on a slow machine, the most informative half of them.

        Args:
          known: times that stay where they are shorter: other work on the machine only adds time
          batch: size of the batches whose cases are measured, too
          done: called now and then with the finished share
          budget: seconds for first calls, again for repeats, and again for overheads
        """
        report = done or (lambda _: None)
        caches: dict[int, TreeCache] = {}
        with self._target.in_use():
            rounds = self._rounds(self.cases(batch), caches, report, budget)
        seconds = {case: min(times) for case, times in rounds.items()}
        spread = _spread(rounds)
        for case in seconds.keys() & known.seconds.keys():
            seconds[case] = min(seconds[case], known.seconds[case])
        one_row, call = seconds["call", 1, SHORT_CONTEXT], partial(self._call, caches=caches)
        rest = {case: s for case, s in known.seconds.items() if case[0] == "overhead"}
        rest = rest or measure_overheads(
            self._target, self._drafter, self._widest, call, one_row, budget
        )
        seconds |= {case: max(s, -one_row / 2) for case, s in rest.items()}
        report(1.0)
        return Timings(known.setup, seconds, spread)

    def sample(self, setup: Setup) -> Timings:
        """Time a few calls of few rows, to compare libraries of matrix products in seconds."""
        calls: list[Case] = [("call", rows, SHORT_CONTEXT) for rows in FEW_ROWS[:6]]
        with self._target.in_use():
            rounds = self._rounds(calls, {}, lambda _: None, _BUDGET / _PATIENCE)
        seconds = {case: min(times) for case, times in rounds.items()}
        rest: dict[Case, float] = {("overhead", s.width, s.length): 0.0 for s in OVERHEADS}
        return Timings(setup, seconds | rest, _spread(rounds))

    def _drafted(self, lengths: Sequence[int]) -> list[int]:
        """Return these lengths, cut to what the drafter can draft, each once."""
        most = None if self._drafter is None else self._drafter.max_length
        return sorted({n if most is None else min(n, most) for n in lengths})

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

    def _rounds(
        self,
        cases: Sequence[Case],
        caches: dict[int, TreeCache],
        report: Callable[[float], None],
        budget: float,
    ) -> dict[Case, list[float]]:
        """Measure the seconds of each case, in turns, until the last rounds agree."""
        calls: dict[Case, Call] = {}
        times: dict[Case, list[float]] = {}
        began = time.perf_counter()
        for i, case in enumerate(cases):
            if 2 * i >= len(cases) and time.perf_counter() - began > budget:
                break
            calls[case] = self._call(case, caches)
            times[case] = [seconds_of(self._target, calls[case], 1)]
            report(i / len(cases) / 2)
        if time.perf_counter() - began > 2 * budget:
            return times  # repeats would take minutes: the first calls are the measurement
        times = {case: [] for case in calls}  # the first ones compiled kernels
        began, done = time.perf_counter(), 0
        while True:
            for case, call in calls.items():
                times[case].append(next_seconds(self._target, call))
            done, spent = done + 1, time.perf_counter() - began
            report(0.5 + min(max(done / _ROUNDS, spent / budget), _PATIENCE) / _PATIENCE / 2)
            if done < _ROUNDS:
                continue
            agree = _spread(times) <= MAX_SPREAD
            limit = budget if agree else _PATIENCE * budget
            if spent * (done + 1) / done > limit or (agree and done == _MAX_ROUNDS):
                break
        for _ in range(_MAX_DOUBTS):
            for case in _doubted(times):
                times[case].append(next_seconds(self._target, calls[case]))
        return times


def _spread(times: Mapping[Case, Sequence[float]]) -> float:
    """Return the typical relative difference of the last repeats of one case."""
    last = [repeats[-_ROUNDS:] for repeats in times.values()]
    return statistics.median([(max(t) - min(t)) / max(min(t), 1e-9) for t in last])


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
