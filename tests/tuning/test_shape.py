"""The chosen shape: the best for this machine and text, found at a bounded cost."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from statistics import mean

import mlx.core as mx
import numpy as np
import pytest
from simulated import (
    ROWS,
    AnswerPolicy,
    Text,
    cliff,
    decode,
    every_shape,
    machine,
    pace,
    step_result,
)

from redrafter_mlx.bench.papers.published import CHIPS, timings
from redrafter_mlx.config import PLAIN, BeamShape
from redrafter_mlx.response import StepResult
from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.speculation.tree import pack_beam
from redrafter_mlx.tuning.acceptance import AcceptanceStatistics, Array, expected_drafts, sizes
from redrafter_mlx.tuning.cost import LENGTHS, CostModel, candidates

PRICEY = machine(
    lambda rows: 46.5 + 15.5 * (rows > 1) + rows, lambda w, n: (2.5 + 0.2 * w) * (n - 1)
)
"""The second row alone costs a third more, as on the paper's M1 Max."""
SLOPE = machine(lambda rows: 60 + 6 * rows, lambda w, n: (3 + 0.3 * w) * (n - 1))
DIP = machine(lambda rows: 70 + (50 if 1 < rows < 14 else 35 if rows > 1 else 0) + 0.5 * rows)
"""Sixteen rows are cheaper than four, as with an optimised BLAS on a CPU."""


class Known(AcceptanceStatistics):
    """Acceptance statistics that are known from the start."""

    def __init__(self, shapes: Sequence[BeamShape], tokens: Callable[[BeamShape], float]) -> None:
        super().__init__(shapes)
        self._tokens = tokens

    def tokens(self) -> Array:
        return np.array([self._tokens(shape) for shape in self.shapes])

    def steps(self) -> Array:
        return np.full(len(self.shapes), math.inf)


@cache
def acceptance(first: float, deeper: float, rescue: float) -> dict[BeamShape, float]:
    """Return the tokens per step of every shape, from three parameters."""
    width, depth = np.arange(4)[:, None], np.arange(7)
    chances = 1 - (1 - first * deeper**depth) * (1 - rescue) ** width
    shapes = every_shape()
    tokens = 1 + expected_drafts(chances, sizes(shapes))
    return dict(zip(shapes, tokens.tolist(), strict=True))


@pytest.mark.parametrize("at", [*range(1, 32), "flat", "slope", "pricey", "dip"])
def test_the_chosen_shape_is_the_best_of_all_within_two_percent(at: int | str) -> None:
    """A cliff at any row, and machines without one; acceptance rates from very low to very high."""
    named = {"flat": machine(lambda _: 20.0), "slope": SLOPE, "pricey": PRICEY, "dip": DIP}
    curves = named[at] if isinstance(at, str) else machine(cliff(at))
    costs = {shape: curves.step(shape, 128) for shape in every_shape()}
    shapes = candidates(curves)
    for first in (0.02, 0.3, 0.5, 0.7, 0.8, 0.9):
        for deeper, rescue in ((0.8, 0.05), (0.8, 0.3), (0.95, 0.05), (0.95, 0.3)):
            tokens = acceptance(first, deeper, rescue)
            policy = AnswerPolicy(curves, Known(shapes, tokens.__getitem__))
            chosen = policy.propose(128)
            best = max(tokens[shape] / cost for shape, cost in costs.items())
            assert tokens[chosen] / costs[chosen] > 0.98 * best


def test_hopeless_drafts_are_left_alone_and_certain_ones_are_long() -> None:
    """Guards the test above, which a policy with one fixed answer might pass."""
    curves = machine(cliff(8))
    shapes = candidates(curves)
    hopeless = AnswerPolicy(curves, Known(shapes, acceptance(0.02, 0.8, 0.0).__getitem__))
    certain = AnswerPolicy(curves, Known(shapes, acceptance(0.98, 1.0, 0.0).__getitem__))
    assert hopeless.propose(128) == PLAIN
    assert certain.propose(128).nodes == 8


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_on_the_papers_machines_the_chosen_shape_is_the_best_measured(
    chip: str, dtype: str
) -> None:
    """With the authors' timings of 16 shapes, and their counts of steps and tokens."""
    curves, tokens = papers_machine(chip, dtype)
    policy = AnswerPolicy(curves, Known(candidates(curves), lambda s: tokens[s.width, s.length]))
    chosen = policy.propose(curves.short_context)
    rates = {
        key: tokens[key] / curves.step(BeamShape(*key), curves.short_context) for key in tokens
    }
    rates[1, 1] = 1 / curves.step(PLAIN, curves.short_context)
    assert rates[chosen.width, chosen.length] > 0.98 * max(rates.values())
    assert max(rates.values()) > 1.2 * rates[1, 1]


def papers_machine(chip: str, dtype: str) -> tuple[CostModel, dict[tuple[int, int], float]]:
    """Return curves that give the cost of the paper's runs, and tokens per step by shape."""
    found = timings(chip, dtype)
    call = found.plain / found.tokens
    tokens = {shape: found.tokens / calls for shape, (calls, _) in found.drafted.items()}
    drafting = [(W, L, took / calls - call) for (W, L), (calls, took) in found.drafted.items()]
    base = machine(lambda _: 1e3 * call)
    curves = CostModel(base.setup, 66, 266, base.short, base.short, tuple(drafting), 0.02)
    return curves, tokens


def test_a_shape_is_left_out_only_if_a_larger_one_costs_no_more() -> None:
    curves = DIP
    kept = candidates(curves)
    assert max(s.nodes for s in kept) <= curves.max_nodes
    whole = {
        shape
        for shape in every_shape()[1:]
        if shape.length in LENGTHS and shape.nodes == shape.width * (shape.length - 1) + 1
    }
    assert whole - {*kept}
    assert whole & {*kept}
    for shape in whole - {*kept}:
        assert any(
            s.width >= shape.width and s.length >= shape.length and s.nodes >= shape.nodes
            and all(
                curves.step(s, context) <= curves.step(shape, context)
                for context in (curves.short_context, curves.long_context)
            )
            for s in kept
        ), shape  # fmt: skip


def test_no_shape_is_wider_than_the_drafter_can_draft() -> None:
    curves = machine(cliff(8))
    assert {s.width for s in candidates(curves, 2)} == {1, 2}
    assert {s.width for s in candidates(curves, 1)} == {1}


def test_a_step_tells_what_every_smaller_shape_would_have_accepted() -> None:
    """Compares with packing the smaller shape's own tree and walking it."""
    rng = random.Random(0)
    total = 0
    for _ in range(30):
        W, L = rng.randint(1, 4), rng.randint(2, 5)
        beams, truth = random_beams(rng, W, L), [rng.randrange(3) for _ in range(L)]
        step = verified(beams, BeamShape(W, L), truth)
        nodes = [*zip(step.beams, step.depths, strict=True)]
        smaller = [
            BeamShape(w, n)
            for w in range(1, W + 1)
            for n in range(2, L + 1)
            if all(max([d for b, d in nodes if b == beam], default=0) >= n - 1 for beam in range(w))
        ]
        statistics = AcceptanceStatistics(smaller)
        for _ in range(60):
            statistics.learn(step)
        for shape, tokens in zip(smaller, statistics.tokens().tolist(), strict=True):
            alone = Beams(
                beams.tokens[:, : shape.width, : shape.length],
                beams.log_probs[:, : shape.width, : shape.length],
            )
            assert round(tokens) == len(verified(alone, shape, truth).path)
            total += 1
    assert total > 150


def random_beams(rng: random.Random, W: int, L: int) -> Beams:
    """Return distinct candidates over three tokens, likeliest first, with consistent scores."""
    rates = {}

    def rate(prefix: tuple[int, ...]) -> float:
        return rates.setdefault(prefix, rng.uniform(0.1, 3.0))

    chosen: set[tuple[int, ...]] = set()
    while len(chosen) < W:
        chosen.add(tuple(rng.randrange(3) for _ in range(L - 1)) if L > 2 else (len(chosen),))
    scores = {c: [-sum(rate(c[:i]) for i in range(1, d + 1)) for d in range(L)] for c in chosen}
    ordered = sorted(chosen, key=lambda c: -scores[c][-1])
    return Beams(
        mx.array([[[9, *c] for c in ordered]]), mx.array([[scores[c] for c in ordered]], mx.float32)
    )


def verified(beams: Beams, shape: BeamShape, truth: list[int]) -> StepResult:
    """Return the step that walks the tree of `beams` along `truth`."""
    tree = pack_beam(beams, shape.nodes)
    valid = sum(tree.valid.tolist()[0])
    tokens, parents = tree.tokens.tolist()[0][:valid], tree.parents.tolist()[0][:valid]
    path, going = [0], True
    while going:
        children = [
            i for i in range(valid)
            if parents[i] == path[-1] and tokens[i] == truth[len(path) - 1]
        ]  # fmt: skip
        path += children
        going = bool(children) and len(path) <= len(truth)
    return step_result(shape, tree.beams.tolist()[0][:valid], tree.depths.tolist()[0][:valid], path)


def test_acceptance_statistics_learn_the_true_tokens_per_step() -> None:
    """For the used shape and a smaller one, compared with the expectation of each by itself."""
    used, smaller = BeamShape(3, 5), BeamShape(2, 3)
    text = Text(0.8, seed=3)
    statistics = AcceptanceStatistics([used, smaller])
    learned = np.zeros(2)
    for i in range(500):
        statistics.learn(text.step(used))
        if i >= 50:
            learned += statistics.tokens() / 450
    assert learned[0] == pytest.approx(text.tokens(used), rel=0.08)
    assert learned[1] == pytest.approx(text.tokens(smaller), rel=0.08)


def test_acceptance_of_larger_shapes_follows_that_of_smaller_ones() -> None:
    """A deeper shape that failed long ago is rated high again once first drafts are accepted."""
    shapes = [BeamShape(1, 2), BeamShape(1, 5)]
    statistics = AcceptanceStatistics(shapes)
    for _ in range(40):
        statistics.learn(step_result(shapes[1], [0] * 5, [0, 1, 2, 3, 4], [0]))
    assert statistics.tokens()[1] < 1.1
    for _ in range(60):
        statistics.learn(step_result(shapes[0], [0, 0], [0, 1], [0, 1]))
    assert statistics.tokens()[1] > 4


def test_plain_steps_make_no_drafter_look_better() -> None:
    policy = AnswerPolicy(machine(cliff(8)), AcceptanceStatistics([BeamShape(1, 2)]))
    policy.propose(128)
    for _ in range(20):
        policy.learn(step_result(BeamShape(1, 2), [0, 0], [0, 1], [0]))
    before = policy.batch.expected_rates(128)[BeamShape(1, 2)]
    for _ in range(1000):
        policy.learn(step_result(PLAIN, [0], [0], [0]))
    assert policy.acceptance.chances()[0, 0] < 0.1
    assert policy.batch.expected_rates(128)[BeamShape(1, 2)] <= before


def test_answers_that_draft_nothing_make_no_drafter_look_better() -> None:
    statistics = AcceptanceStatistics([BeamShape(1, 2)])
    for _ in range(20):
        statistics.learn(step_result(BeamShape(1, 2), [0, 0], [0, 1], [0]))
    chance = statistics.chances()[0, 0]
    for _ in range(2000):
        statistics = statistics.continued(statistics.shapes)
    assert statistics.chances()[0, 0] == pytest.approx(chance)


def test_a_cut_tree_counts_no_miss_where_it_had_no_room() -> None:
    """Beam 0's third draft was cut from the tree, so that it was not accepted is no evidence."""
    shape = BeamShape(2, 4, 4)
    step = step_result(shape, [0, 0, 0, 1], [0, 1, 2, 2], [0, 1, 2])
    statistics = AcceptanceStatistics([BeamShape(1, 4)])
    before = statistics.chances()[0, 2]
    for _ in range(50):
        statistics.learn(step)
    assert statistics.chances()[0, 2] > before


PROBES_ARE_DEAR = ("pricey", "dip")
"""Any draft costs half a call, so probes are rare."""

MACHINES = {"cliff": machine(cliff(8)), "slope": SLOPE, "dip": DIP, "pricey": PRICEY}
SEEDS = range(3)
MANY_SEEDS = range(24)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize(("before", "after"), [(0.95, 0.0), (0.3, 0.95), (0.95, 0.4)])
def test_a_text_that_changes_is_followed_within_32_steps(
    name: str, before: float, after: float
) -> None:
    """After 32 steps the speed is that of an unchanging text, in the mean of many texts."""
    curves, ratios = MACHINES[name], []
    for seed in MANY_SEEDS if before < after else SEEDS:  # probes succeed by chance
        texts = [Text(before, seed)] * 90 + [Text(after, 50 + seed)] * 132
        changed = decode(AnswerPolicy(curves), curves, texts)[90 + 32 :]
        steady = decode(AnswerPolicy(curves), curves, [Text(after, 50 + seed)] * 180)[80:]
        ratios.append(pace(changed) / pace(steady))
    assert mean(ratios) > (0.85 if name in PROBES_ARE_DEAR and before < after else 0.93)


@pytest.mark.parametrize("name", MACHINES)
def test_drafting_begins_again_when_it_pays_again(name: str) -> None:
    """Starts with a text that decodes plainly; the delay depends on the cost of a probe."""
    waited = []
    for seed in MANY_SEEDS:
        texts = [Text(0.0, seed)] * 120 + [Text(0.95, 50 + seed)] * 300
        steps = decode(AnswerPolicy(MACHINES[name]), MACHINES[name], texts)
        drafted = [step.shape != PLAIN for step in steps]
        assert sum(drafted[60:120]) < 30
        waited.append(next(i for i in range(294) if all(drafted[120 + i : 126 + i])))
    assert sum(waited) / len(waited) < (64 if name in PROBES_ARE_DEAR else 32), waited


DRAFT_MODEL = machine(cliff(16), lambda w, n: (9 + w) * (n - 1))
"""Each level of drafting costs half a call, as with a draft language model."""


@pytest.mark.parametrize("name", [*MACHINES, "draft model"])
def test_a_random_drafter_costs_at_most_three_percent(name: str) -> None:
    """From the second answer on; the first answer costs a little more."""
    curves = MACHINES.get(name, DRAFT_MODEL)
    for seed in SEEDS:
        policy = AnswerPolicy(curves)
        plain = curves.step(PLAIN, 128)
        assert pace(decode(policy, curves, [Text(0.0, seed)] * 128)) * plain > 0.94
        again = AnswerPolicy(curves, policy.acceptance.continued(policy.acceptance.shapes))
        assert pace(decode(again, curves, [Text(0.0, 9 + seed)] * 512)) * plain > 0.97


@pytest.mark.parametrize("name", [*MACHINES, "draft model"])
@pytest.mark.parametrize("before", [0.95, 0.6])
def test_a_useless_drafter_costs_at_most_two_percent_wherever_it_was_useful_before(
    name: str, before: float
) -> None:
    """Its drafts must be given up first, and then probes take a share of the time."""
    curves, paces = MACHINES.get(name, DRAFT_MODEL), []
    for seed in SEEDS:
        policy = AnswerPolicy(curves)
        decode(policy, curves, [Text(before, seed)] * 120)
        paces.append(pace(decode(policy, curves, [Text(0.0, 50 + seed)] * 2000)))
    assert mean(paces) * curves.step(PLAIN, 128) > 0.98


def test_useless_drafts_that_seem_nearly_free_cost_little() -> None:
    """Two rows take as long as one, and a single draft delays the plain steps beside it.

    The delay is seen in no step that is timed; times vary by 8%.
    """

    def two_rows_take(ms: float, level: float) -> CostModel:
        return machine(lambda n: 40 + (n > 1) * ms + (n > 2) * 10 + n, lambda _, n: level * (n - 1))

    believed, true = two_rows_take(6.0, 2.8), two_rows_take(0.0, 1.5)
    plain, paces = true.step(PLAIN, 128), []
    for seed in range(4):
        rng, policy, before, seconds = random.Random(seed), AnswerPolicy(believed), PLAIN, 0.0
        text, unread = Text(0.0, seed), list[StepResult]()
        for _ in range(1500):
            shape = policy.propose(128)
            takes = true.step(shape, 128) + (0.2 * plain if shape != before else 0.0)
            timed = takes * rng.lognormvariate(0, 0.08) if shape == before else None
            unread.append(replace(text.step(shape), seconds=timed))
            seconds, before = seconds + takes, shape
            if len(unread) > 2:
                policy.learn(unread.pop(0))
        paces.append(1500 * plain / seconds)
    assert mean(paces) > 0.975


def test_a_good_drafter_is_used_from_the_first_step() -> None:
    curves = machine(cliff(8))
    steps = decode(AnswerPolicy(curves), curves, [Text(1.0, 5)] * 64)
    assert steps[0].shape != PLAIN
    assert pace(steps) > 1.5 / curves.step(PLAIN, 128)


def test_a_drafter_whose_levels_are_dear_drafts_few() -> None:
    text = Text(1.0, 5)
    steps = decode(AnswerPolicy(DRAFT_MODEL), DRAFT_MODEL, [text] * 150)[20:]
    paces = {s: text.tokens(s) / DRAFT_MODEL.step(s, 128) for s in candidates(DRAFT_MODEL)}
    assert pace(steps) > 0.95 * max(paces.values())
    assert max(step.shape.length for step in steps) < 5


def test_a_small_gain_is_not_worth_a_change() -> None:
    """Two shapes whose estimates differ by less than a percent do not alternate."""
    curves = machine(lambda _: 20.0, lambda _w, n: 0.01 * n, widest=1, longest=3)
    shapes = candidates(curves)
    wavering = iter([0.0, 0.004] * 20)
    known = Known(shapes, lambda s: 2.0 + (next(wavering) if s.length == 3 else 0.002))
    policy = AnswerPolicy(curves, known)
    seen = set()
    for _ in range(20):
        seen.add(policy.propose(128))
        policy.learn(step_result(BeamShape(1, 2), [0, 0], [0, 1], [0]))
    assert len(seen) == 1


def test_a_machine_where_two_rows_cost_twice_one_decodes_plainly() -> None:
    curves = machine(lambda rows: 20.0 * rows)
    policy = AnswerPolicy(curves)
    steps = decode(policy, curves, [Text(0.8, 1)] * 200)
    assert sum(step.shape == PLAIN for step in steps) > 180


def test_the_context_is_looked_at_too() -> None:
    """If attention grows with the rows, a long context makes trees smaller."""
    base = machine(lambda rows: 20 + 0.1 * rows)
    curves = CostModel(
        base.setup, 128, 2048, base.short,
        tuple((r, s + 0.02 * r) for r, s in base.short), base.draft, 0.0,
    )  # fmt: skip
    tokens = acceptance(0.8, 0.95, 0.2)
    policy = AnswerPolicy(curves, Known(candidates(curves), tokens.__getitem__))
    assert policy.propose(8192).nodes < policy.propose(128).nodes
    assert max(ROWS) == curves.max_nodes


@pytest.mark.parametrize("name", ["cliff", "slope"])
def test_probing_other_shapes_costs_two_percent_of_the_time_at_most(name: str) -> None:
    """Compared with the shape in use, after an earlier answer has filled the statistics."""
    curves, lost, spent = MACHINES[name], 0.0, 0.0
    for seed in SEEDS:
        first = AnswerPolicy(curves)
        decode(first, curves, [Text(0.8, seed)] * 150)
        policy = AnswerPolicy(curves, first.acceptance.continued(first.acceptance.shapes))
        steps = decode(policy, curves, [Text(0.8, 50 + seed)] * 300)
        usual = Counter(step.shape for step in steps).most_common(1)[0][0]
        usual_pace = pace([step for step in steps if step.shape == usual])
        lost += sum(step.seconds - step.tokens / usual_pace for step in steps)
        spent += sum(step.seconds for step in steps)
    assert lost < 0.02 * spent
