"""Errors of the cost profile: measured step times override predictions."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest
from simulated import AnswerPolicy, Taken, Text, cliff, decode, every_shape, machine, pace, sequence

from redrafter_mlx.config import PLAIN, BeamShape
from redrafter_mlx.response import StepResult
from redrafter_mlx.tuning.acceptance import AcceptanceStatistics
from redrafter_mlx.tuning.corrections import Corrections
from redrafter_mlx.tuning.cost import CostModel, candidates
from redrafter_mlx.tuning.policy import TunedPolicy

UNEVEN = machine(
    lambda rows: 60 - 6 * (rows == 2) + 25 * (rows > 2) + 2 * rows, lambda _, n: 4.0 * (n - 1)
)
"""Two rows cost less than one, three a third more, as with a BLAS that was measured."""


class Told(AnswerPolicy):
    """A policy that receives other times than the steps took."""

    def __init__(
        self, costs: CostModel, factor: Callable[[], float | None], times: Corrections | None = None
    ) -> None:
        super().__init__(costs, times=times)
        self._factor = factor

    def learn(self, step: StepResult) -> None:
        factor = self._factor()
        seconds = None if factor is None else step.seconds * factor
        super().learn(replace(step, seconds=seconds))


def mismeasured(costs: CostModel, rng: random.Random) -> CostModel:
    """Return the profile of a busy moment: each row count is about a fifth too slow or too fast."""
    short = tuple((rows, seconds * math.exp(rng.gauss(0, 0.2))) for rows, seconds in costs.short)
    return replace(costs, short=short)


def test_steps_correct_a_profile_that_was_measured_at_a_busy_moment() -> None:
    def tokens_per_second(factor: Callable[[], float | None]) -> float:
        total = 0.0
        for seed in range(12):
            believed = mismeasured(UNEVEN, random.Random(seed))
            texts = [Text(skill, seed) for skill in (0.3, 0.9, 0.6, 0.8) for _ in range(40)]
            total += pace(decode(Told(believed, factor), UNEVEN, texts))
        return total

    assert tokens_per_second(lambda: 1.0) > 1.02 * tokens_per_second(lambda: None)


@pytest.mark.parametrize("skill", [0.0, 0.1, 0.3, 0.8])
def test_one_row_that_the_profile_has_too_dear_costs_little(skill: float) -> None:
    """Over many answers: drafts that only seem to be free are compared with plain steps."""

    def one_row_takes(ms: float) -> CostModel:
        return machine(lambda rows: ms if rows == 1 else 29.0 + 4.0 * rows, lambda _, n: n - 1.0)

    believed, true = one_row_takes(45.0), one_row_takes(32.0)
    times, taken = Corrections(), []
    acceptance = AnswerPolicy(believed).acceptance
    for seed in range(12):
        acceptance = acceptance.continued(acceptance.shapes)
        policy = AnswerPolicy(believed, acceptance, times)
        taken += decode(policy, true, [Text(skill, seed)] * 60)
    best = max(Text(skill).tokens(shape) / true.step(shape, 128) for shape in every_shape())
    assert pace(taken[60:]) > 0.97 / true.step(PLAIN, 128)
    assert skill not in (0.0, 0.8) or pace(taken[60:]) > 0.95 * best


def test_a_machine_that_is_slower_for_all_steps_changes_nothing() -> None:
    def shapes(slowness: float) -> list[object]:
        policy = Told(UNEVEN, lambda: slowness)
        return [step.shape for step in decode(policy, UNEVEN, [Text(0.9, 1)] * 120)]

    assert shapes(4.0) == shapes(1.0)


def test_noise_costs_little_where_the_profile_is_right() -> None:
    """About a third of a step's time, up or down."""
    quiet = noisy = 0.0
    for seed in range(6):
        rng, texts = random.Random(seed), [Text(0.8, seed)] * 150
        quiet += pace(decode(AnswerPolicy(machine(cliff(8))), machine(cliff(8)), texts))
        policy = Told(machine(cliff(8)), lambda rng=rng: math.exp(rng.gauss(0, 0.3)))
        noisy += pace(decode(policy, machine(cliff(8)), texts))
    assert noisy > 0.97 * quiet


@pytest.mark.parametrize("slowness", [0.5, 1.0, 4.0])
def test_a_correction_is_relative_to_the_other_steps_of_the_time(slowness: float) -> None:
    times = Corrections()
    for _ in range(20):
        times.of(1).learn(1, 2.0, 2.0 * slowness)
        times.of(1).learn(1, 2.0, 2.0 * slowness)
        times.of(1).learn(9, 3.0, 4.5 * slowness)
    assert times.of(1).correction(9) == pytest.approx(1.5)
    assert times.of(1).slowness() == pytest.approx(slowness)


def test_a_row_count_that_is_not_known_is_corrected_like_those_that_are() -> None:
    """If rows of several sizes differ alike, the profile is wrong about one row; not if few do."""
    times, corrections = Corrections(), []
    for rows in (4, 7):
        for _ in range(9):
            times.of(1).learn(1, 1.0, 1.0)
            times.of(1).learn(1, 1.0, 1.0)
            times.of(1).learn(rows, 1.0, 1.5)
        corrections.append(times.of(1).correction(20))
    assert 1.0 < corrections[0] < corrections[1] == pytest.approx(1.5)


def test_a_slow_step_or_two_correct_nothing() -> None:
    times = Corrections()
    for seconds in (1.0, 1.0, 1.0, 9.0, 9.0, 1.0):
        times.of(1).learn(1, 1.0, 1.0)
        times.of(1).learn(1, 1.0, 1.0)
        times.of(1).learn(4, 1.0, seconds)
    assert 4 in times.of(1).factors
    assert times.of(1).correction(4) == 1.0


@pytest.mark.parametrize(
    "used", [[1], [2], [2, 4], [2, 4, 8]], ids=["plain", "one shape", "two shapes", "three shapes"]
)
def test_a_correction_does_not_wander_off_while_nothing_contradicts_it(used: list[int]) -> None:
    """Steps vary by an eighth, and by half while the machine is busy; one in 64 is plain."""
    for seed in range(4):
        rng, times, busy = random.Random(seed), Corrections(), False
        for step in range(6000):
            busy ^= rng.random() < 0.03
            every = step < 60 or step % 64 == 0
            rows = rng.choice([1, *used] if step < 60 else [1] if every else used)
            times.of(1).learn(rows, 1.0, math.exp(rng.gauss(0, 0.12)) * (1.5 if busy else 1.0))
            if step > 120:
                assert all(0.7 < times.of(1).correction(rows) < 1.4 for rows in (1, *used))


@pytest.mark.parametrize("restarted", [False, True], ids=["one process", "many processes"])
def test_what_was_dear_is_tried_again_after_some_hundred_steps(restarted: bool) -> None:
    times = Corrections()
    for _ in range(9):
        times.of(1).learn(9, 1.0, 3.0)
        for _ in range(3):
            times.of(1).learn(1, 1.0, 1.0)
    assert times.of(1).correction(9) == 3.0
    for step in range(800):
        times.of(1).learn(1, 1.0, 1.0)
        if restarted and step % 20 == 0:
            times = Corrections.from_record(times.to_record())
        assert step > 300 or times.of(1).correction(9) == 3.0
    assert times.of(1).correction(9) == 1.0


def test_what_was_cheap_stays_so_without_being_used() -> None:
    """If drafts promise little, plain steps are timed a few times and then hardly made."""
    times = Corrections()
    for _ in range(6):
        times.of(1).learn(1, 1.0, 1.0)
        for _ in range(3):
            times.of(1).learn(2, 1.0, 0.7)
    for _ in range(2000):
        times.of(1).learn(1, 1.0, 1.0)
    assert times.of(1).correction(2) == pytest.approx(0.7)


def test_batches_of_about_the_same_size_are_timed_together() -> None:
    """Where answers come and go, no size has enough steps of its own; a restart changes nothing."""
    times = Corrections()
    for batch in (5, 6, 8, 7) * 8:
        times.of(batch).learn(1, 1.0, 1.0)
        times.of(batch).learn(2, 1.0, 1.25)
    for known in (times, Corrections.from_record(times.to_record())):
        assert [known.of(batch).correction(2) for batch in range(4, 10)] == [1, *[1.25] * 4, 1]
        of_two = [2 in known.of(batch).factors for batch in (1, 2, 4, 5, 9)]
        assert of_two == [False] * 3 + [True, False]


def test_a_plain_step_that_was_due_and_not_timed_is_repeated_once() -> None:
    """It is the first of its size in a longer text, and compiles its graph."""
    times = Corrections()
    due = []
    for step in range(40):
        due.append(times.of(1).plain_is_due(2))
        if due[-1]:
            times.of(1).learn(1, 1.0, None)
        assert step < 7 or due[7]
    assert [i for i, one in enumerate(due) if one] == [7, 8, 15, 16]


@pytest.mark.parametrize("untimed", [0, 20])
def test_a_batch_whose_first_steps_shared_the_machine_is_timed_later(untimed: int) -> None:
    """Otherwise nothing would ever contradict a cost model that is wrong about its drafts."""
    costs, dearer = UNEVEN, 2.2
    policy = TunedPolicy(costs, AcceptanceStatistics(candidates(costs, batches=(1, 8))))
    rows = [sequence() for _ in range(4)]
    shapes, unread, text = [], [], Text(0.8, 1)
    for step in range(1500):
        shapes.append(policy.propose(rows).shape)
        seconds = costs.step(shapes[-1], 128, 4) * (1 if shapes[-1] == PLAIN else dearer)
        reported = None if step < untimed else seconds
        unread.append([replace(text.step(shapes[-1]), seconds=reported) for _ in rows])
        if len(unread) > 2:
            policy.learn(rows, unread.pop(0))
    assert sum(shape == PLAIN for shape in shapes[-500:]) > 450


TIMED = (PLAIN, BeamShape(1, 2), BeamShape(2, 4))
"""Shapes of which a few steps are timed after a measurement."""


@pytest.mark.parametrize("skill", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize(
    ("plain", "drafted"), [(-0.1, 0.1), (-0.3, 0.1), (0.0, 0.5), (-0.5, 0.5), (0.1, 0.1)]
)
def test_what_a_step_takes_beside_its_calls_is_learned_from_a_few_steps(
    plain: float, drafted: float, skill: float
) -> None:
    """As shares of a one-row call; compared with a policy to which it is part of the calls."""
    paces = {}
    for name, believed in {"cliff": machine(cliff(8)), **WRONG}.items():
        (_, one), *others = believed.short
        short = ((1, one * (1 + plain)), *((rows, s + drafted * one) for rows, s in others))
        true = replace(believed, short=short)
        for costs, timed in ((true, ()), (believed, TIMED * 4)):
            times, taken = Corrections(), list[Taken]()
            for shape in sorted(timed, key=TIMED.index):
                times.of(1).learn(shape.nodes, costs.step(shape, 1), true.step(shape, 1))
            for seed in range(3):
                taken += decode(AnswerPolicy(costs, None, times), true, [Text(skill, seed)] * 40)
            paces[name, costs is true] = pace(taken)
    ratios = [paces[name, False] / known for (name, known_too), known in paces.items() if known_too]
    assert statistics.fmean(ratios) > 0.97
    assert min(ratios) > 0.9


COSTLY = machine(lambda rows: 46 + 15 * (rows > 1) + rows, lambda w, n: (2.5 + 0.2 * w) * (n - 1))
SLOPE = machine(lambda rows: 60 + 6 * rows, lambda w, n: (3 + 0.3 * w) * (n - 1))
DIP = machine(lambda rows: 70 + (50 if 1 < rows < 14 else 35 if rows > 1 else 0) + 0.5 * rows)
WRONG = {"cliff": machine(cliff(8)), "slope": SLOPE, "dip": DIP, "costly": COSTLY, "uneven": UNEVEN}
WRONG_ROWS = ({1}, {2}, {3, 4}, {*range(5, 9)}, {*range(9, 17)}, {*range(2, 33)})


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("skill", [0.3, 0.6, 0.9])
def test_costs_that_are_wrong_at_some_rows_are_found_out_within_forty_steps(
    name: str, skill: float
) -> None:
    """By a factor of 1.5 in both directions; compared with a policy that knows the costs."""
    true, ratios = WRONG[name], []

    def later(believed: CostModel) -> float:
        steps = (decode(AnswerPolicy(believed), true, [Text(skill, s)] * 140) for s in range(3))
        return statistics.fmean(pace(taken[40:]) for taken in steps)

    known = later(true)
    for rows in WRONG_ROWS:
        for factor in (1.5, 1 / 1.5):
            wrong = [
                tuple((n, seconds * (factor if n in rows else 1.0)) for n, seconds in curve)
                for curve in (true.short, true.long)
            ]
            ratios.append(later(replace(true, short=wrong[0], long=wrong[1])) / known)
    assert min(ratios) > 0.8
    assert statistics.fmean(ratios) > 0.95
