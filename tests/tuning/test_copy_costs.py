"""Copies of the text: verified if they pay, judged by the cost and acceptance of past steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from simulated import AnswerPolicy, cliff, machine, step_result

from redrafter_mlx.config import PLAIN
from redrafter_mlx.drafting.untrained.ngram import Lookup, NgramIndex
from redrafter_mlx.tuning.acceptance import AcceptanceStatistics
from redrafter_mlx.tuning.cost import CostModel

COSTS = machine(cliff(16))


class Machine:
    """Every step takes `slowness` times its modelled cost, one with copies also `dearer` times."""

    def __init__(
        self,
        costs: CostModel,
        slowness: float = 1.0,
        dearer: float = 1.0,
        of_nodes: Callable[[int], bool] = lambda _: True,
    ) -> None:
        """`of_nodes`: which trees are `dearer`."""
        self.policy, self.dearer = AnswerPolicy(costs, AcceptanceStatistics(())), dearer
        self._costs, self._slowness, self._of_nodes = costs, slowness, of_nodes

    def step(self, rows: int) -> float:
        """Return the seconds of a step; a step with one row has no copies."""
        seconds = self._costs.step(PLAIN, 0)
        if rows > 1:
            seconds = self._costs.verify(rows, 0)
            seconds *= self.dearer if self._of_nodes(rows) else 1.0
        return self._slowness * seconds


def copying(machine: Machine, text: Sequence[int], start: int) -> tuple[int, int, int]:
    """Decode a text after its first `start` tokens; return steps, copies and accepted tokens.

    Only copies are drafted. The text is known in advance, as a greedy target's is fixed.
    """
    index, at, policy = NgramIndex(Lookup(), text[:start]), start, machine.policy
    steps = copies = accepted = 0
    read = None
    while at < len(text) - 40:
        policy.propose(0)
        plan = policy.revise(index, PLAIN, drawn=False)
        if read is not None:
            policy.learn(read)
        path, shape = [0], PLAIN
        if plan is not None:
            (copy,) = plan.continuations
            held = 0
            while held < len(copy.tokens) and copy.tokens[held] == text[at + held]:
                held += 1
            path, shape = [*range(held + 1)], plan.shape
            copies, accepted = copies + 1, accepted + held
        seconds = machine.step(shape.nodes)
        nodes = [*range(shape.nodes)]
        read = step_result(shape, [0] * shape.nodes, nodes, path, plan is not None, seconds)
        read = replace(read, tokens=text[at : at + len(path)])
        index.extend(text[at : at + len(path)])
        at, steps = at + len(path), steps + 1
    return steps, copies, accepted


def page(length: int = 40) -> list[int]:
    rng = random.Random(0)
    return [rng.randrange(1000) for _ in range(length)]


def half_repeated() -> list[int]:
    """Return a page repeated, with an equally long new text after it each time."""
    rng = random.Random(1)
    return [t for _ in range(30) for t in (*page(), *(rng.randrange(10**6) for _ in range(40)))]


def test_a_text_that_repeats_itself_is_copied_far() -> None:
    """A page of forty tokens, repeated."""
    steps, copies, accepted = copying(Machine(COSTS), page() * 12, 60)
    assert copies > 0.9 * steps
    assert accepted / copies > 10


def test_matches_that_never_hold_are_soon_left_alone() -> None:
    """The same two tokens, with something new after them each time."""
    text = [t for i in range(400) for t in (1, 2, 1000 + i)]
    steps, copies, _ = copying(Machine(COSTS), text, 8)
    assert copies < 0.02 * steps


def test_a_copy_is_not_taken_where_its_rows_cost_more_than_it_saves() -> None:
    assert copying(Machine(machine(lambda rows: 20.0 * rows)), page() * 6, 60)[1] == 0


@pytest.mark.parametrize("slowness", [1.0, 7.0])
@pytest.mark.parametrize("dearer", [1.0, 2.0, 20.0])
def test_what_copies_cost_is_learned_from_their_steps(slowness: float, dearer: float) -> None:
    """Judged relative to other steps: a machine slower than measured is slower for all of them."""
    machine = Machine(COSTS, slowness, dearer)
    copying(machine, half_repeated(), 60)
    _, copies, _ = copying(machine, half_repeated(), 60)
    assert copies == copies_of(dearer)
    assert (copies > 40) == (dearer < 20.0)


def copies_of(dearer: float) -> int:
    machine = Machine(COSTS, 1.0, dearer)
    copying(machine, half_repeated(), 60)
    return copying(machine, half_repeated(), 60)[1]


def test_copies_that_take_more_time_than_they_save_are_soon_left_alone() -> None:
    _, copies, _ = copying(Machine(COSTS), half_repeated(), 60)
    _, dear_copies, _ = copying(Machine(COSTS, dearer=20.0), half_repeated(), 60)
    assert copies > 50
    assert dear_copies < 10


def test_copies_that_were_too_dear_are_tried_again_in_later_answers() -> None:
    machine = Machine(COSTS, dearer=20.0)
    copying(machine, half_repeated(), 60)
    assert copying(machine, page() * 12, 60)[1] < 10
    machine.dearer = 1.0
    for _ in range(5):
        machine.policy.batch.begin_answer()
    steps, copies, _ = copying(machine, page() * 12, 60)
    assert copies > 0.8 * steps


@pytest.mark.parametrize("long_ones", [False, True])
def test_what_long_copies_cost_says_little_about_short_ones(long_ones: bool) -> None:
    """A profile may be wrong about one of them: it was measured in seconds, on a busy machine."""
    short = [t for i in range(200) for t in (1, 2, 3, 4, 5, 6, 1000 + i)]
    machine = Machine(COSTS, dearer=20.0, of_nodes=lambda nodes: (nodes > 16) == long_ones)
    copying(machine, short, 60)
    copying(machine, half_repeated(), 60)
    _, of_short, _ = copying(machine, short, 60)
    _, copies, accepted = copying(machine, half_repeated(), 60)
    assert (of_short > 50) == long_ones
    assert copies > 25
    assert (accepted > 10 * copies) != long_ones


def test_one_long_copy_that_fails_does_not_end_copying() -> None:
    """Not within the text, and even less in the next one."""
    trust = Machine(COSTS).policy.acceptance.trust
    trust.learn("long match", 0.9, 0.0)
    assert trust.of("long match") > 0.5
    for _ in range(50):
        trust.learn("long match", 0.9, 0.0)
    assert trust.of("long match") < 0.1
    trust.begin_answer()
    assert 0.1 < trust.of("long match") < 0.5


def test_short_matches_that_never_hold_say_nothing_about_long_ones() -> None:
    machine = Machine(COSTS)
    trust = machine.policy.acceptance.trust
    for _ in range(50):
        trust.learn("short match", 0.5, 0.0)
    assert trust.of("short match") < 0.1
    assert trust.of("long match") == 1
    steps, taken, accepted = copying(machine, page() * 12, 60)
    assert taken > 0.9 * steps
    assert accepted / taken > 10


def test_a_text_that_repeats_itself_is_copied_after_texts_that_did_not_hold() -> None:
    machine = Machine(COSTS)
    for i in range(3):
        copying(machine, [t for n in range(100) for t in (1, 2, 1000 * i + n)], 8)
    for _ in range(2):
        machine.policy.acceptance.trust.begin_answer()
    steps, copies, _ = copying(machine, page() * 12, 60)
    assert copies > 0.8 * steps
