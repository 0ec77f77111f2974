"""Profile: times the target's calls and the drafting on this machine.

All are measured in turns: a machine that becomes slower does so for all of them. As in decoding, a
call follows one like it, whose buffers fit. Short calls are submitted together, to wait less often.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import mlx.core as mx

from redrafter_mlx.config import BeamShape, SamplingParams
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.interface import Drafter, Seen
from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.speculation.sampling import sequence_keys
from redrafter_mlx.speculation.tree import TokenTree, pack_beam
from redrafter_mlx.target_model.cache.kv_cache import TreeCache
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.tuning.cost import FEW_ROWS, LONG_CONTEXT, SHORT_CONTEXT, CostModel, Setup

Call = Callable[[], Sequence[mx.array]]

Case = tuple[Literal["call", "draft"], int, int]
"""What is timed: ("call", query rows, context) or ("draft", W, L)."""

MAX_SPREAD = 1 / 3
"""Maximum typical difference of repeats: others would poison every later choice (test_tune)."""

ROWS, LONG_ROWS, DRAFT_LENGTHS = (*range(1, 18), 20, 24, 28, 32), (1, 8, 16, 32), (2, 4, 8)
"""Query rows of the timed calls at the two contexts, of which only attention depends on the second,
and beam lengths at which drafting is timed: each further level repeats the same work."""

_BUDGET = 12.0
"""Seconds for the first call of every case, and again for repeats: in all less than a minute on a
quiet machine (test_measuring_ends_in_time_on_a_machine_that_stays_busy)."""

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

    def cases(self) -> list[Case]:
        """Return the cases to measure, the most informative first."""
        longest = None if self.drafter is None else self.drafter.max_length
        lengths = sorted({min(n, longest or n) for n in DRAFT_LENGTHS})
        more = [rows for rows in ROWS if rows not in FEW_ROWS]
        return [
            *few_calls(len(FEW_ROWS)),
            *[("draft", w + 1, n) for n in lengths for w in range(self._widest)],
            *[("call", rows, LONG_CONTEXT) for rows in LONG_ROWS],
            *[("call", rows, SHORT_CONTEXT) for rows in more],
        ]

    def measure(
        self,
        setup: Setup,
        done: Callable[[float], None] | None = None,
        budget: float = _BUDGET,
        cases: Sequence[Case] = (),
    ) -> CostModel:
        """Measure all cases now; on a slow machine, the most informative half of them.

        done:  called now and then with the finished share
        cases: to measure instead
        """
        report = done or (lambda _: None)
        with self.target.in_use():
            times = self._times(cases or self.cases(), report, budget)
        report(1.0)
        shortest = sorted((*case, min(seconds)) for case, seconds in times.items())
        short, long = (
            tuple((rows, s) for kind, rows, at, s in shortest if (kind, at) == ("call", context))
            for context in (SHORT_CONTEXT, LONG_CONTEXT)
        )
        draft = tuple((w, n, s) for kind, w, n, s in shortest if kind == "draft")
        contexts = SHORT_CONTEXT, LONG_CONTEXT
        return CostModel(setup, *contexts, short, long or short, draft, _spread(times))

    def sample(self, setup: Setup) -> CostModel:
        """Time a few calls of few rows, to compare libraries of matrix products in seconds."""
        return self.measure(setup, budget=_BUDGET / _ROUNDS, cases=few_calls(6))

    def _times(
        self, cases: Sequence[Case], report: Callable[[float], None], budget: float
    ) -> dict[Case, list[float]]:
        """Measure the seconds of each case, in turns, until the last rounds agree."""
        began, first, target = time.perf_counter(), dict[Case, float](), self.target
        calls: dict[Case, Call] = {}
        caches = {context: target.new_cache() for context in (SHORT_CONTEXT, LONG_CONTEXT)}
        for i, case in enumerate(cases):
            if 2 * i >= len(cases) and time.perf_counter() - began > budget:
                break
            kind, n, m = case
            if kind == "call":
                calls[case] = verification_call(target, caches[m], n, m)
            elif self.drafter is not None:
                calls[case] = drafting_call(target, self.drafter, BeamShape(n, m))
            first[case] = seconds_of(target, calls[case], 1)
            report(i / len(cases) / 2)
        if time.perf_counter() - began > 2 * budget:
            return {case: [seconds] for case, seconds in first.items()}  # repeats take minutes

        at_once = budget / (len(cases) * 2 * _ROUNDS**2)  # seconds
        times = {case: list[float]() for case in calls}

        def repeat(case: Case) -> None:
            """Time a call that follows one like it: the mean of several short ones."""
            one = seconds_of(target, calls[case], 1)
            several = max(1, min(_ROUNDS**2, int(at_once / max(one, 1e-9))))
            times[case].append(seconds_of(target, calls[case], several))

        began, done, agree = time.perf_counter(), 0, False
        while done < _ROUNDS**2 or not agree:
            for case in calls:
                repeat(case)
            done += 1
            report(min(0.5 + done / _ROUNDS**2 / 2, 1.0))
            agree = done >= _ROUNDS and _spread(times) <= MAX_SPREAD
            limit = budget if agree else _ROUNDS * budget
            if done >= _ROUNDS and time.perf_counter() - began > limit:
                break
        for _ in range(_ROUNDS**2):
            for case in _doubted(times):
                repeat(case)
        return times


def few_calls(count: int) -> list[Case]:
    """Return the cases of the calls with fewest rows."""
    return [("call", rows, SHORT_CONTEXT) for rows in FEW_ROWS[:count]]


def _spread(times: Mapping[Case, Sequence[float]]) -> float:
    """Return the typical relative difference of the last repeats of one case."""
    last = [repeats[-_ROUNDS:] for repeats in times.values()]
    return statistics.median([(max(t) - min(t)) / max(min(t), 1e-9) for t in last])


def _doubted(times: Mapping[Case, Sequence[float]]) -> list[Case]:
    """Return the calls that take longer than one with more rows, by more than repeats differ."""
    noise = 1 + _spread(times)
    calls = [(*case[1:], min(repeats)) for case, repeats in times.items() if case[0] == "call"]
    return [
        ("call", rows, context)
        for rows, context, seconds in calls
        if seconds > noise * min([s for n, at, s in calls if n >= rows and at == context])
    ]


def random_tree(rows: int, vocab: int) -> TokenTree:
    """Return a tree of `rows` random tokens that branches where it can; two nodes are a chain."""
    W, L = 4 if rows > 2 else 1, 2 + rows // 2
    tokens = mx.random.randint(0, vocab, (1, W, L), key=mx.random.key(rows))
    tokens[:, :, 0] = 1 % vocab
    tokens[:, :, 1] = mx.arange(W) % vocab  # branches that share the root alone
    scores = -mx.broadcast_to(mx.arange(L).astype(mx.float32), (1, W, L))
    return pack_beam(Beams(tokens, scores), rows)


def verification_call(target: Target, cache: TreeCache, rows: int, context: int) -> Call:
    """Return the target's call on a tree of `rows` nodes after `context` tokens, all made up."""
    tree, length = random_tree(rows, target.vocab_size), mx.array([context])

    def call() -> Sequence[mx.array]:
        hidden, logits = target.verify(tree, cache, length, context)
        return [hidden, mx.argmax(logits, axis=-1), *cache.buffers]

    return call


def drafting_call(target: Target, drafter: Drafter, shape: BeamShape) -> Call:
    """Return a call that drafts and packs one shape, after a made-up token and one after it."""
    decoder = Decoder(target, drafter, shape, SamplingParams())
    token = 1 % target.vocab_size
    with target.lock:
        state, _ = decoder.start(decoder.new_cache(), 0, [[token]], sequence_keys(0))
        mx.eval(state.drafts.tree.tokens)
    features = mx.zeros((1, 1, target.context_size), target.dtype)
    read = features if drafter.features.any else None
    seen = Seen(mx.array([[token] * 2]), read, state.length, mx.array([1]), 2)

    def call() -> Sequence[mx.array]:
        tree = decoder.draft(state, seen, shape).tree
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
