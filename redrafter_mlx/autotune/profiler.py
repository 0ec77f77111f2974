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
from dataclasses import replace
from importlib import metadata
from itertools import accumulate

import mlx.core as mx
import mlx.nn as nn

from redrafter_mlx.autotune.cost_model import (
    BATCH_LENGTHS,
    BATCH_ROWS,
    BATCHES,
    DRAFT_LENGTHS,
    FEW_ROWS,
    LONG_CONTEXT,
    LONG_ROWS,
    MOST_NODES,
    OVERHEADS,
    ROWS,
    SHORT_CONTEXT,
    Case,
    Setup,
    Timings,
    raise_overheads,
)
from redrafter_mlx.autotune.timed_calls import Call, drafting_call, seconds_of, verification_call
from redrafter_mlx.config import PLAIN, BeamShape, SamplingParams
from redrafter_mlx.decoding.loop import Decoder
from redrafter_mlx.decoding.single import decode
from redrafter_mlx.decoding.step_result import StepResult
from redrafter_mlx.drafting.interface import Drafter
from redrafter_mlx.runtime.blas import BLAS
from redrafter_mlx.runtime.device import chip_name, dtype_name, system_name
from redrafter_mlx.runtime.launched import launch_name
from redrafter_mlx.speculation.sampling import sequence_keys
from redrafter_mlx.target.fingerprint import shapes_hash
from redrafter_mlx.target.kv_cache import TreeCache
from redrafter_mlx.target.model import Target
from redrafter_mlx.version import __version__

SHARE = 0.02
"""Share of the answers' time that measuring may take."""

_REPEATS = 3
_PRICE = 2 * (_REPEATS + 1)
"""Maximum cost of one measurement, in steps: its first call compiles."""

_STEPS = 6
"""Number of steps that are compared with their parts."""

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

_BURST, _MOST_CALLS = 0.02, 8
"""Seconds of short calls that are submitted at once, and their maximum number."""


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
            with BLAS.threads_by_rows():
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
        with BLAS.threads_by_rows():
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
        seconds |= overheads or self._overheads(timings, budget)
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
                times[case].append(_next_seconds(self._target, call))
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
                times[case].append(_next_seconds(self._target, calls[case]))
        return times

    def _overheads(self, timings: Timings, budget: float) -> dict[Case, float]:
        """Measure a step's overhead beyond its parts: plain, with one beam and with several.

        A step and its parts are measured in turn, and the shortest of each are compared: the
        overhead is small, and other work on the machine adds more. Plain steps can take less than a
        call alone, as the host works ahead. Despite noise, a plain step gets the smallest overhead
        and a step with several beams the largest, and none is more than a one-row call, or takes
        off more than half of one.
        """
        caches: dict[int, TreeCache] = {}
        parts: dict[BeamShape, list[Call]] = {}
        for shape in OVERHEADS if self._drafter is not None else [PLAIN]:
            shape = replace(shape, width=min(shape.width, self._widest or 1))
            parts[shape] = [self._call(("call", shape.nodes, SHORT_CONTEXT), caches)]
            if shape != PLAIN:
                parts[shape].append(self._call(("draft", shape.width, shape.length), caches))
        steps: list[list[float]] = [[] for _ in parts]
        sums: list[list[float]] = [[] for _ in parts]
        prompt = [(7 * i + 1) % self._target.vocab_size for i in range(SHORT_CONTEXT)]
        began = time.perf_counter()
        while not steps[0] or (len(steps[0]) < _REPEATS and time.perf_counter() - began < budget):
            for i, (shape, calls) in enumerate(parts.items()):
                decoder = Decoder(self._target, self._drafter, shape, SamplingParams())
                steps[i].append(step_seconds(decoder, prompt, _STEPS))
                with BLAS.threads_by_rows():
                    sums[i].append(sum(_shortest_seconds(self._target, call) for call in calls))
        most = timings.seconds["call", 1, SHORT_CONTEXT]
        found = [min(s) - min(p) for s, p in zip(steps, sums, strict=True)]
        rising = [*accumulate((max(-most / 2, min(rest, most)) for rest in found), max)]
        cases: list[Case] = [("overhead", s.width, s.length) for s in OVERHEADS]
        of_copies = max(rising[-1], 0.0)  # without a drafter nothing else is drafted
        return dict(zip(cases, [*rising, of_copies, of_copies], strict=False))


def setup_of(model: nn.Module, target: Target, drafter: str) -> Setup:
    """Return the setup that times hold for; `drafter` is equal for drafters with equal times."""
    return Setup(
        chip=f"{mx.default_device().type.name} {chip_name()}",
        model=f"{target.model_type} {shapes_hash(model)}",
        drafter=drafter,
        dtype=dtype_name(target.dtype),
        mlx=metadata.version("mlx"),
        blas=BLAS.library or BLAS.note,
        launch=launch_name(),
        others=f"{system_name()}, mlx-lm {metadata.version('mlx-lm')}, {__version__}",
    )


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


def step_seconds(decoder: Decoder, prompt: list[int], steps: int) -> float:
    """Measure a step of the decoding loop after a prompt: of `steps`, the shortest half in a row.

    Single steps would not do: one that is read late makes the next one seem short.
    """
    read: list[float] = []

    def finished(_: StepResult) -> bool:
        read.append(time.perf_counter())
        return len(read) == steps + 2  # the prompt, and a first step that compiles

    for _ in decode(decoder, decoder.new_cache(), 0, prompt, sequence_keys(0), finished):
        pass
    half = steps // 2
    return min(b - a for a, b in zip(read[1:], read[1 + half :], strict=False)) / half


def _next_seconds(target: Target, call: Call) -> float:
    """Return the seconds of a call that follows one like it, the mean of several short ones."""
    first = seconds_of(target, call, 1)
    return seconds_of(target, call, max(1, min(_MOST_CALLS, int(_BURST / max(first, 1e-9)))))


def _shortest_seconds(target: Target, call: Call) -> float:
    """Return the shortest of as many measurements as there are steps to compare it with."""
    return min(_next_seconds(target, call) for _ in range(_STEPS // 2))
