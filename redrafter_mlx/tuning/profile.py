"""Profile: times the target's calls, the drafting and whole steps on this machine.

All are measured in turns: a machine that becomes slower does so for all of them. As in decoding, a
call follows one like it, whose buffers fit. Short calls are submitted together, to wait less often.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import mlx.core as mx
import numpy as np

from redrafter_mlx.config import PLAIN, BeamShape, SamplingParams
from redrafter_mlx.decoding.single import decode
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.interface import Drafter, Seen
from redrafter_mlx.response import StepResult
from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.speculation.sampling import sequence_keys
from redrafter_mlx.speculation.tree import TokenTree, pack_beam
from redrafter_mlx.target_model.cache.kv_cache import TreeCache
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.tuning.cost import (
    FEW_ROWS,
    LONG_CONTEXT,
    SHORT_CONTEXT,
    TIMED_STEPS,
    CostModel,
    Setup,
)

Call = Callable[[], Sequence[mx.array]]

Case = tuple[Literal["call", "draft"], int, int]
"""What is timed: ("call", query rows, context) or ("draft", B * W, L)."""

MAX_SPREAD = 1 / 3
"""Maximum typical difference of repeats: others would poison every later choice (test_tune)."""

ROWS, LONG_ROWS, DRAFT_LENGTHS = (*range(1, 18), 20, 24, 28, 32), (1, 8, 16, 32), (2, 4, 8)
"""Query rows of the timed calls at the two contexts, of which only attention depends on the second,
and beam lengths at which drafting is timed: each further level repeats the same work."""

_BUDGET = 12.0
"""Seconds for the first call of every case, again for repeats, and again for overheads: in all a
minute on a quiet machine (test_measuring_ends_in_time_on_a_machine_that_stays_busy)."""

_ROUNDS = 3
"""Number of last repeats that must agree, and how often the budget they may take until they do. Its
square is the maximum number of repeats that agree, of further ones of a call that seems to take
longer than one with more rows, and of calls that are submitted at once. The shortest is used: other
work on the machine only adds time (test_a_busy_machine_is_measured_until_its_repeats_agree)."""


class Profiler:
    """Measures the times of one target and its drafter."""

    def __init__(self, target: Target, drafter: Drafter | None, widest: int) -> None:
        """`widest`: maximum number of beams drafted for a sequence, 0 without a drafter."""
        self.target, self.drafter, self._widest = target, drafter, widest
        self._caches: dict[int, TreeCache] = {}  # by context
        self._at_once = 0.0  # seconds of calls that are submitted together

    def cases(self) -> list[Case]:
        """Return the cases to measure, the most informative first."""
        longest = None if self.drafter is None else self.drafter.max_length
        lengths = sorted({min(n, longest or n) for n in DRAFT_LENGTHS})
        calls: list[Case] = [("call", rows, SHORT_CONTEXT) for rows in FEW_ROWS]
        more: list[Case] = [("call", rows, SHORT_CONTEXT) for rows in ROWS if rows not in FEW_ROWS]
        long: list[Case] = [("call", rows, LONG_CONTEXT) for rows in LONG_ROWS]
        drafts: list[Case] = [("draft", w + 1, n) for n in lengths for w in range(self._widest)]
        return [*calls, *drafts, *long, *more]

    def measure(
        self, setup: Setup, done: Callable[[float], None] | None = None, budget: float = _BUDGET
    ) -> CostModel:
        """Measure all cases now; on a slow machine, the most informative half of them.

        done: called now and then with the finished share
        """
        report = done or (lambda _: None)
        with self.target.in_use():
            times = self._rounds(self.cases(), report, budget)
        overheads = self._overheads(min(times["call", 1, SHORT_CONTEXT]), budget)
        self._caches.clear()
        report(1.0)
        return _costs(setup, times, overheads)

    def sample(self, setup: Setup) -> CostModel:
        """Time a few calls of few rows, to compare libraries of matrix products in seconds."""
        calls: list[Case] = [("call", rows, SHORT_CONTEXT) for rows in FEW_ROWS[:6]]
        with self.target.in_use():
            times = self._rounds(calls, lambda _: None, _BUDGET / _ROUNDS)
        self._caches.clear()
        return _costs(setup, times, (0.0, 0.0, 0.0))

    def _call(self, case: Case) -> Call:
        """Return a call to time; calls at one context share a cache."""
        kind, first, second = case
        if kind == "draft":
            assert self.drafter is not None
            return drafting_call(self.target, self.drafter, BeamShape(first, second))
        cache = self._caches.setdefault(second, self.target.new_cache())
        return verification_call(self.target, cache, first, second)

    def _seconds(self, call: Call) -> float:
        """Return the seconds of a call that follows one like it, the mean of several short ones."""
        first = seconds_of(self.target, call, 1)
        times = max(1, min(_ROUNDS**2, int(self._at_once / max(first, 1e-9))))
        return seconds_of(self.target, call, times)

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
            times[case] = [seconds_of(self.target, calls[case], 1)]
            report(i / len(cases) / 2)
        if time.perf_counter() - began > 2 * budget:
            return times  # repeats would take minutes: the first calls are the measurement
        times = {case: [] for case in calls}  # the first ones compiled kernels
        began, done, agree = time.perf_counter(), 0, False
        self._at_once = budget / (len(cases) * 2 * _ROUNDS**2)
        while done < _ROUNDS**2 or not agree:
            for case, call in calls.items():
                times[case].append(self._seconds(call))
            done += 1
            report(0.5 + min(done / _ROUNDS**2, 1.0) / 2)
            agree = done >= _ROUNDS and _spread(times) <= MAX_SPREAD
            limit = budget if agree else _ROUNDS * budget
            if done >= _ROUNDS and time.perf_counter() - began > limit:
                break
        for _ in range(_ROUNDS**2):
            for case in _doubted(times):
                times[case].append(self._seconds(calls[case]))
        return times

    def _overheads(self, one_row: float, budget: float) -> tuple[float, float, float]:
        """Measure what a step takes beyond its parts: plain, with one beam and with several.

        A step and its parts are measured in turn, and the shortest of each are compared. Plain
        steps can take less than a call alone, as the host works ahead. Despite noise, overheads
        rise in this order, and are between minus a half and the whole of a one-row call.
        """
        shapes = [replace(s, width=min(s.width, self._widest or 1)) for s in TIMED_STEPS]
        shapes = shapes if self.drafter is not None else [PLAIN]
        steps, parts = [math.inf] * len(shapes), [math.inf] * len(shapes)
        began = time.perf_counter()
        for _ in range(_ROUNDS):
            for i, shape in enumerate(shapes):
                decoder = Decoder(self.target, self.drafter, shape, SamplingParams())
                steps[i] = min(steps[i], step_seconds(decoder))
                cases: list[Case] = [("call", shape.nodes, SHORT_CONTEXT)]
                cases += [] if shape == PLAIN else [("draft", shape.width, shape.length)]
                with self.target.in_use():
                    calls = [self._call(case) for case in cases]
                    shortest = [min([self._seconds(c) for _ in range(_ROUNDS)]) for c in calls]
                parts[i] = min(parts[i], sum(shortest))
            if time.perf_counter() - began >= budget:
                break
        found = np.subtract(steps, parts).clip(-one_row / 2, one_row)
        rising: list[float] = np.maximum.accumulate(found).tolist()
        of_copies = max(rising[-1], 0.0)  # without a drafter nothing else is drafted
        plain, chain, tree = rising + [of_copies] * (len(TIMED_STEPS) - len(rising))
        return plain, chain, tree


def _costs(
    setup: Setup, times: Mapping[Case, Sequence[float]], overheads: tuple[float, float, float]
) -> CostModel:
    """Return the cost model of the shortest times of each case."""
    shortest = sorted((*case, min(seconds)) for case, seconds in times.items())
    short, long = (
        tuple((rows, s) for kind, rows, at, s in shortest if kind == "call" and at == context)
        for context in (SHORT_CONTEXT, LONG_CONTEXT)
    )
    draft = tuple((w, n, s) for kind, w, n, s in shortest if kind == "draft")
    contexts = SHORT_CONTEXT, LONG_CONTEXT
    return CostModel(setup, *contexts, short, long or short, draft, *overheads, _spread(times))


def _spread(times: Mapping[Case, Sequence[float]]) -> float:
    """Return the typical relative difference of the last repeats of one case."""
    last = [repeats[-_ROUNDS:] for repeats in times.values()]
    return statistics.median([(max(t) - min(t)) / max(min(t), 1e-9) for t in last])


def _doubted(times: Mapping[Case, Sequence[float]]) -> list[Case]:
    """Return the calls that take longer than one with more rows, by more than repeats differ."""
    noise = 1 + _spread(times)
    calls = [(case, min(repeats)) for case, repeats in times.items() if case[0] == "call"]
    return [
        case
        for case, seconds in calls
        if any(
            rows > case[1] and context == case[2] and seconds > noise * other
            for (_, rows, context), other in calls
        )
    ]


def random_tree(rows: int, vocab: int) -> TokenTree:
    """Return a tree of `rows` random tokens that branches where it can; two nodes are a chain."""
    if rows <= 2:
        tokens = mx.array([[[1 % vocab, 2 % vocab][:rows]]], mx.int32)
        return pack_beam(Beams(tokens, -mx.arange(rows, dtype=mx.float32)[None, None]), rows)
    W, L = 4, 2 + rows // 2
    tokens = mx.random.randint(0, vocab, (1, W, L), key=mx.random.key(rows))
    tokens = mx.where(mx.arange(L) == 0, tokens[:, :1, :1], tokens)
    # Four branches that share nothing but the root, even with a small vocabulary.
    tokens = mx.where(mx.arange(L) == 1, mx.arange(W)[None, :, None] % vocab, tokens)
    scores = -mx.broadcast_to(mx.arange(L).astype(mx.float32), (1, W, L))
    return pack_beam(Beams(tokens.astype(mx.int32), scores), rows)


def verification_call(target: Target, cache: TreeCache, rows: int, context: int) -> Call:
    """Return the target's call on a tree of `rows` nodes after `context` tokens, all made up."""
    tree, length = random_tree(rows, target.vocab_size), mx.array([context])

    def call() -> Sequence[mx.array]:
        hidden, logits = target.verify(tree, cache, length, context)
        return [hidden, mx.argmax(logits, axis=-1), *cache.buffers]

    return call


def drafting_call(target: Target, drafter: Drafter, shape: BeamShape) -> Call:
    """Return a call that drafts and packs one shape after a made-up text."""
    P, wanted = SHORT_CONTEXT, drafter.features
    C = target.context_size if wanted.any else 0
    features = mx.random.normal((1, P, C), key=mx.random.key(0)).astype(target.dtype)
    tokens = mx.ones((1, P + 1), mx.int32) % target.vocab_size
    memory = drafter.empty(1)
    last, one = mx.array([P - 1], mx.int32), mx.ones((1,), mx.int32)
    if wanted.every_position:
        text = Seen(tokens, features if C else None, last - last, last, P - 1, 0)
        memory = drafter.extend(memory, text)
        mx.eval(memory)
    seen = Seen(tokens[:, :2], features[:, :1] if C else None, last, one, P)
    if wanted.caches:
        cache = target.new_cache()
        target.append(tokens[:, :P], cache, 0)
        seen = replace(seen, committed=cache.committed(wanted.caches, last + one, P))
        mx.eval(seen.committed)

    def call() -> Sequence[mx.array]:
        nonlocal memory
        beams, memory = drafter.draft(memory, seen, shape)
        tree = pack_beam(beams, shape.nodes)
        return [tree.tokens, tree.parents, tree.depths, tree.mask]

    return call


def seconds_of(target: Target, call: Call, times: int) -> float:
    """Return the seconds per call of `times` calls that are submitted together."""
    with target.lock:
        mx.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            last = call()
            mx.async_eval(*last)
        mx.eval(*last)
        return (time.perf_counter() - began) / times


def step_seconds(decoder: Decoder) -> float:
    """Return the seconds of a step of the decoding loop: of several, the shortest few in a row.

    Single steps would not do: one that is read late makes the next one seem short.
    """
    times = step_times(decoder, SHORT_CONTEXT, 2 * _ROUNDS)
    return min([sum(times[i : i + _ROUNDS]) for i in range(_ROUNDS + 1)]) / _ROUNDS


def step_times(decoder: Decoder, context: int, count: int) -> list[float]:
    """Return the seconds of `count` steps in a row of the decoding loop, after some tokens."""
    prompt = [(7 * i + 1) % decoder.target.vocab_size for i in range(context)]
    read: list[float] = []

    def finished(_: StepResult) -> bool:
        read.append(time.perf_counter())
        return len(read) == count + 2  # the prompt, and a first step that compiles

    for _ in decode(decoder, decoder.new_cache(), 0, prompt, sequence_keys(0), finished):
        pass
    return [b - a for a, b in pairwise(read[1:])]
