"""Copies of the text: verified if they pay, judged by the cost and acceptance of past steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from simulated import AnswerPolicy, cliff, machine, step_result

from redrafter_mlx.config import PLAIN
from redrafter_mlx.drafting.ngram import Lookup, NgramIndex
from redrafter_mlx.tuning.acceptance import AcceptanceStatistics
from redrafter_mlx.tuning.cost_model import CostModel

COSTS = machine(cliff(16))


class Machine:
    """Every step takes `slowness` times its modelled cost, one with copies also `dearer` times."""

    def __init__(self, costs: CostModel, slowness: float = 1.0, dearer: float = 1.0) -> None:
        self.policy = AnswerPolicy(costs, AcceptanceStatistics(()))
        self._costs, self._slowness, self._dearer = costs, slowness, dearer

    def step(self, rows: int) -> float:
        """Return the seconds of a step; a step with one row has no copies."""
        seconds = self._costs.step(PLAIN, 0)
        if rows > 1:
            seconds = self._dearer * (self._costs.verify(rows, 0) + self._costs.overhead(1))
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
@pytest.mark.parametrize("dearer", [1.0, 2.0])
def test_what_copies_cost_is_learned_from_their_steps(slowness: float, dearer: float) -> None:
    """Judged relative to other steps: a machine slower than measured is slower for all of them."""
    machine = Machine(COSTS, slowness, dearer)
    copying(machine, half_repeated(), 60)
    assert machine.policy.acceptance.copies.cost(8) == pytest.approx(dearer)


def test_copies_that_take_more_time_than_they_save_are_soon_left_alone() -> None:
    _, copies, _ = copying(Machine(COSTS), half_repeated(), 60)
    _, dear_copies, _ = copying(Machine(COSTS, dearer=20.0), half_repeated(), 60)
    assert copies > 50
    assert dear_copies < 10


def test_copies_that_were_too_dear_are_tried_again_in_later_answers() -> None:
    copies = Machine(COSTS).policy.acceptance.copies
    assumed = copies.cost(4)
    for _ in range(20):
        copies.learn_cost(4, 20.0)
    assert copies.cost(4) == copies.cost(2) == 20.0
    assert copies.cost(32) < assumed, "a long one is worth a try"
    for _ in range(5):
        copies.begin_answer()
    assert copies.cost(4) == assumed


def test_what_long_copies_cost_says_little_about_short_ones() -> None:
    """A profile may be wrong about one of them: it was measured in seconds, on a busy machine."""
    copies = Machine(COSTS).policy.acceptance.copies
    for _ in range(9):
        copies.learn_cost(4, 1.1)
        copies.learn_cost(32, 0.5)
        copies.learn_cost(31, 0.5)
    assert copies.cost(3) == copies.cost(4) == 1.1
    assert copies.cost(32) == copies.cost(17) == 0.5
    assert copies.cost(8) == 0.5, "as most steps with copies"


def test_one_long_copy_that_fails_does_not_end_copying() -> None:
    """Not within the text, and even less in the next one."""
    copies = Machine(COSTS).policy.acceptance.copies
    copies.learn(8, 0.9, 0.0)
    assert copies.trust(8) > 0.5
    for _ in range(50):
        copies.learn(8, 0.9, 0.0)
    assert copies.trust(8) < 0.1
    copies.begin_answer()
    assert 0.1 < copies.trust(8) < 0.5


def test_short_matches_that_never_hold_say_nothing_about_long_ones() -> None:
    machine = Machine(COSTS)
    copies = machine.policy.acceptance.copies
    for _ in range(50):
        copies.learn(2, 0.5, 0.0)
    assert copies.trust(7) < 0.1
    assert copies.trust(8) == 1
    steps, taken, accepted = copying(machine, page() * 12, 60)
    assert taken > 0.9 * steps
    assert accepted / taken > 10


def test_a_text_that_repeats_itself_is_copied_after_texts_that_did_not_hold() -> None:
    machine = Machine(COSTS)
    for i in range(3):
        copying(machine, [t for n in range(100) for t in (1, 2, 1000 * i + n)], 8)
    for _ in range(2):
        machine.policy.acceptance.copies.begin_answer()
    steps, copies, _ = copying(machine, page() * 12, 60)
    assert copies > 0.8 * steps
