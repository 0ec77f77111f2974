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
from dataclasses import replace
from itertools import accumulate

from redrafter_mlx.config import PLAIN, BeamShape, SamplingParams
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.interface import Drafter
from redrafter_mlx.target_model.kv_cache import TreeCache
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.tuning.cost import FEW_ROWS, TIMED_STEPS
from redrafter_mlx.tuning.timed_calls import (
    Call,
    drafting_call,
    seconds_of,
    step_seconds,
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

_BUDGET, _PATIENCE = 12.0, 4
"""Seconds for the first call of every case, again for repeats, and again for overheads; and how
often that time the repeats may take while they differ too much: `tune` takes a minute on a quiet
machine and three on a busy one (test_measuring_ends_in_time_on_a_machine_that_stays_busy)."""

_ROUNDS, _MAX_ROUNDS = 3, 9
"""Minimum number of repeats, which is how many of the last ones must agree, and the maximum once
they do. The shortest is used: other work on the machine only adds time."""

_DOUBTFUL, _MAX_DOUBTS = 1.1, 8
"""A call that seems to take this much longer than one with more rows is repeated, so many times at
most: a machine that was busy for its few repeats would rule out its row count."""

_BURST, _MAX_BURST = 0.02, 8
"""Seconds of short calls that are submitted at once, and their maximum number."""


class Profiler:
    """Measures the times of one target and its drafter."""

    def __init__(self, target: Target, drafter: Drafter | None, widest: int) -> None:
        """`widest`: maximum number of beams drafted for a sequence, 0 without a drafter."""
        self._target, self._drafter, self._widest = target, drafter, widest
        self._caches: dict[int, TreeCache] = {}  # by context

    def cases(self) -> list[Case]:
        """Return the cases to measure, the most informative first."""
        longest = None if self._drafter is None else self._drafter.max_length
        lengths = sorted({min(n, longest or n) for n in DRAFT_LENGTHS})
        calls: list[Case] = [("call", rows, SHORT_CONTEXT) for rows in FEW_ROWS]
        more: list[Case] = [("call", rows, SHORT_CONTEXT) for rows in ROWS if rows not in FEW_ROWS]
        long: list[Case] = [("call", rows, LONG_CONTEXT) for rows in LONG_ROWS]
        drafts: list[Case] = [("draft", w + 1, n) for n in lengths for w in range(self._widest)]
        return [*calls, *drafts, *long, *more]

    def measure(
        self, setup: Setup, done: Callable[[float], None] | None = None, budget: float = _BUDGET
    ) -> Timings:
        """Measure all cases now; on a slow machine, the most informative half of them.

        Args:
          setup: the setup that is measured
          done: called now and then with the finished share
          budget: seconds for first calls, again for repeats, and again for overheads
        """
        report = done or (lambda _: None)
        with self._target.in_use():
            rounds = self._rounds(self.cases(), report, budget)
        seconds = {case: min(times) for case, times in rounds.items()}
        seconds |= self._overheads(seconds["call", 1, SHORT_CONTEXT], budget)
        self._caches.clear()
        report(1.0)
        return Timings(setup, seconds, _spread(rounds))

    def sample(self, setup: Setup) -> Timings:
        """Time a few calls of few rows, to compare libraries of matrix products in seconds."""
        calls: list[Case] = [("call", rows, SHORT_CONTEXT) for rows in FEW_ROWS[:6]]
        with self._target.in_use():
            rounds = self._rounds(calls, lambda _: None, _BUDGET / _PATIENCE)
        self._caches.clear()
        seconds = {case: min(times) for case, times in rounds.items()}
        rest: dict[Case, float] = {("overhead", s.width, s.length): 0.0 for s in TIMED_STEPS}
        return Timings(setup, seconds | rest, _spread(rounds))

    def _call(self, case: Case) -> Call:
        """Return a call to time; calls at one context share a cache."""
        kind, first, second = case
        if kind == "draft":
            assert self._drafter is not None
            return drafting_call(self._target, self._drafter, BeamShape(first, second))
        cache = self._caches.setdefault(second, self._target.new_cache())
        return verification_call(self._target, cache, first, second)

    def _seconds(self, call: Call) -> float:
        """Return the seconds of a call that follows one like it, the mean of several short ones."""
        first = seconds_of(self._target, call, 1)
        times = max(1, min(_MAX_BURST, int(_BURST / max(first, 1e-9))))
        return seconds_of(self._target, call, times)

    def _rounds(
        self, cases: Sequence[Case], report: Callable[[float], None], budget: float
    ) -> dict[Case, list[float]]:
        """Measure the seconds of each case, in turns, until the last rounds agree."""
        calls: dict[Case, Call] = {}
        times: dict[Case, list[float]] = {}
        began = time.perf_counter()
        for i, case in enumerate(cases):
            if 2 * i >= len(cases) and time.perf_counter() - began > budget:
                break
            calls[case] = self._call(case)
            times[case] = [seconds_of(self._target, calls[case], 1)]
            report(i / len(cases) / 2)
        if time.perf_counter() - began > 2 * budget:
            return times  # repeats would take minutes: the first calls are the measurement
        times = {case: [] for case in calls}  # the first ones compiled kernels
        began, done = time.perf_counter(), 0
        while True:
            for case, call in calls.items():
                times[case].append(self._seconds(call))
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
                times[case].append(self._seconds(calls[case]))
        return times

    def _overheads(self, one_row: float, budget: float) -> dict[Case, float]:
        """Measure what a step takes beyond its parts: plain, with one beam and with several.

        A step and its parts are measured in turn, and the shortest of each are compared: the
        overhead is small, and other work on the machine adds more. Plain steps can take less than a
        call alone, as the host works ahead. Despite noise, a plain step gets the smallest overhead
        and a step with several beams the largest, and none is more than a one-row call, or takes
        off more than half of one.
        """
        shapes = [replace(s, width=min(s.width, self._widest or 1)) for s in TIMED_STEPS]
        shapes = shapes if self._drafter is not None else [PLAIN]
        steps: list[list[float]] = [[] for _ in shapes]
        parts: list[list[float]] = [[] for _ in shapes]
        began = time.perf_counter()
        while not steps[0] or (len(steps[0]) < _ROUNDS and time.perf_counter() - began < budget):
            for i, shape in enumerate(shapes):
                decoder = Decoder(self._target, self._drafter, shape, SamplingParams())
                steps[i].append(step_seconds(decoder))
                cases: list[Case] = [("call", shape.nodes, SHORT_CONTEXT)]
                cases += [] if shape == PLAIN else [("draft", shape.width, shape.length)]
                with self._target.in_use():
                    calls = [self._call(case) for case in cases]
                    parts[i].append(
                        sum([min([self._seconds(c) for _ in range(_ROUNDS)]) for c in calls])
                    )
        found = [min(s) - min(p) for s, p in zip(steps, parts, strict=True)]
        rising = [*accumulate((max(-one_row / 2, min(rest, one_row)) for rest in found), max)]
        of_copies = max(rising[-1], 0.0)  # without a drafter nothing else is drafted
        rising += [of_copies] * (len(TIMED_STEPS) - len(rising))
        return {
            ("overhead", shape.width, shape.length): rest
            for shape, rest in zip(TIMED_STEPS, rising, strict=True)
        }


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
