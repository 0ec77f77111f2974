"""The first answers of a fresh cache: costs are assumed, and no answer is slower for that."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
from simulated import SETUP, Taken, Text, machine, sequence

from redrafter_mlx.config import PLAIN
from redrafter_mlx.decoding.sequence import Drafted
from redrafter_mlx.drafting.untrained.ngram import Lookup, NgramIndex
from redrafter_mlx.response import StepResult
from redrafter_mlx.tuning.acceptance import AcceptanceStatistics
from redrafter_mlx.tuning.corrections import Corrections
from redrafter_mlx.tuning.cost import CostModel, assumed_costs, candidates
from redrafter_mlx.tuning.policy import TunedPolicy
from redrafter_mlx.tuning.tuner import trial_shapes

MEASURED = {1: 37.5, 2: 34.7, 3: 58.1, 4: 70.7, 6: 75.0, 8: 86.4, 12: 87.8, 16: 93.0, 24: 120.4,
            32: 138.3}  # fmt: skip
"""Milliseconds of SmolLM2's call by query rows, on two cores with MKL."""

BACKENDS = ("cpu", "apple", "cuda")
ASSUMED = {backend: assumed_costs(SETUP, backend, 4) for backend in BACKENDS}
MACHINES = {
    **{backend: (costs, costs) for backend, costs in ASSUMED.items()},
    "two cores": (
        ASSUMED["cpu"],
        machine(
            lambda rows: next(ms for n, ms in MEASURED.items() if n >= rows),
            lambda w, n: 2.5 * (1 + 0.1 * w) * (n - 1),
        ),
    ),
}
"""What is assumed of a machine, and what it takes."""

COMPILING = 0.6
"""Share of a plain step by which the first step with a number of query rows takes longer."""

SEEDS = range(6)


def answers(
    assumed: CostModel,
    true: CostModel,
    skill: float,
    tokens: int,
    number: int,
    seed: int,
    tried: bool = True,
    saved: float = math.inf,
) -> list[list[Taken]]:
    """Return the steps of a process's first answers with at least so many tokens each.

    tried: whether a trial, of another text, came before them
    saved: seconds that probes may cost at first
    """
    known, times = AcceptanceStatistics(candidates(assumed)), Corrections()
    times.saved = saved
    compiled, taken = {PLAIN.nodes}, list[list[Taken]]()
    for i in range(-tried, number):
        trial = trial_shapes(4) if i < 0 else ()
        policy, steps = TunedPolicy(assumed, known, times, trial), list[Taken]()
        text, row, unread = Text(skill, 1000 * seed + i), sequence(), list[StepResult]()
        while len(steps) < len(trial) if trial else sum(step.tokens for step in steps) < tokens:
            shape = policy.propose([row]).shape
            seconds, new = true.step(shape, 128), shape.nodes not in compiled
            compiled.add(shape.nodes)
            extra = COMPILING * true.step(PLAIN, 128) if new else 0.0
            steps.append(Taken(shape, seconds + extra, text.tokens(shape)))
            unread.append(replace(text.step(shape), seconds=None if new else seconds))
            if len(unread) > 2:
                policy.learn([row], [unread.pop(0)])
        if not trial:
            taken.append(steps)
        known = known.continued(known.shapes)
    return taken


def dearer(costs: CostModel, factor: float) -> CostModel:
    """Return the costs with every drafted step `factor` times as long."""
    (_, one), *others = costs.short
    (_, long), *longer = costs.long
    return replace(
        costs,
        short=((1, one), *((rows, s * factor) for rows, s in others)),
        long=((1, long), *((rows, s * factor) for rows, s in longer)),
        draft=tuple((w, n, s * factor) for w, n, s in costs.draft),
    )


@cache
def speedups(
    name: str, skill: float, factor: float, tokens: int, number: int, tried: bool = True
) -> list[float]:
    """Return the speed of each of the first answers, relative to plain steps: the mean of texts."""
    assumed, true = MACHINES[name][0], dearer(MACHINES[name][1], factor)
    plain, each = true.step(PLAIN, 128), [0.0] * number
    for seed in SEEDS:
        for i, steps in enumerate(answers(assumed, true, skill, tokens, number, seed, tried)):
            made, seconds = sum(s.tokens for s in steps), sum(s.seconds for s in steps)
            each[i] += made * plain / seconds / len(SEEDS)
    return each


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("factor", [1 / 1.5, 1.0, 1.5])
@pytest.mark.parametrize("skill", [0.0, 0.3, 0.55, 0.9])
@pytest.mark.parametrize("tried", [False, True])
def test_no_answer_with_a_fresh_cache_is_slower_than_plain_decoding_by_over_three_percent(
    name: str, skill: float, factor: float, tried: bool
) -> None:
    """Whatever the drafter is worth, and with drafts that cost up to 1.5 times what is assumed."""
    for tokens, number in ((16, 10), (32, 5), (60, 3), (100, 2)):
        assert min(speedups(name, skill, factor, tokens, number, tried)) > 0.97, tokens


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("factor", [1 / 1.5, 1.0])
@pytest.mark.parametrize("skill", [0.55, 0.9])
def test_a_first_answer_gains_three_quarters_of_what_later_ones_gain(
    name: str, factor: float, skill: float
) -> None:
    """From its first tokens on, or half, where trees that are larger than the trial's pay."""
    later = speedups(name, skill, factor, 120, 8)[-1] - 1
    share = 0.75 if MACHINES[name][0] is ASSUMED["cpu"] else 0.5
    for tokens in (25, 60, 120) if later > 0.05 else ():
        assert speedups(name, skill, factor, tokens, 1)[0] - 1 > share * later, tokens


@pytest.mark.parametrize("name", MACHINES)
def test_drafts_that_pay_are_found_without_a_trial_too(name: str) -> None:
    """As in a batch, or where the trial's steps were not timed."""
    once, again = speedups(name, 0.9, 1.0, 250, 2, tried=False)
    assert once > 1.08
    assert again > 1.2


@pytest.mark.parametrize("name", MACHINES)
def test_the_smallest_tree_is_the_first_that_is_tried(name: str) -> None:
    """Its step costs least, so it shows most cheaply what drafts cost and what they are worth."""
    assumed, true = MACHINES[name]
    assert trial_shapes(4)[0].nodes == 2
    (steps,) = answers(assumed, true, 0.9, 150, 1, 0, tried=False)
    drafted = [step.shape.nodes for step in steps if step.shape != PLAIN]
    assert drafted[0] == 2
    assert steps.index(next(step for step in steps if step.shape != PLAIN)) >= 16


@pytest.mark.parametrize("name", MACHINES)
def test_short_answers_that_try_nothing_save_for_a_probe_together(name: str) -> None:
    """Where nothing is left from before, one answer saves too little for a probe."""
    assumed, true = MACHINES[name]
    tokens = 70 if name == "apple" else 55  # whose smallest tree costs a third more
    first, second = answers(assumed, true, 0.3, tokens, 2, 0, tried=False, saved=0.0)
    tried = [[step.shape != PLAIN for step in steps] for steps in (first, second)]
    assert [any(drafted) for drafted in tried] == [False, True]
    assert tried[1].index(True) >= 30, "and the answer that pays for it is long enough for it"


@pytest.mark.parametrize("backend", BACKENDS)
def test_copies_are_short_until_it_is_known_what_they_take(backend: str) -> None:
    """Except after a long match, which holds; and one that pays only as assumed is not verified."""
    assumed = ASSUMED[backend]
    measured = replace(assumed, assumed=False)

    def copied(costs: CostModel, text: list[int]) -> int:
        policy, row = TunedPolicy(costs), sequence(len(text), NgramIndex(Lookup(), text))
        policy.propose([row])
        (plan,) = policy.revise([row], [Drafted(PLAIN)])
        return 0 if plan is None else len(plan.continuations[0].tokens)

    page = [*range(100, 140)]
    matches = [[*page, 7, *page[:length]] for length in (2, 6, 8)]
    assert copied(measured, matches[1]) == 7
    assert [copied(assumed, text) for text in matches] == [0, 3, 31]
