"""The shape that all rows of a batch share, chosen by their total cost and mean acceptance."""

from __future__ import annotations

import gc
import random
import statistics
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import get_args

import pytest
from simulated import (
    Taken,
    Text,
    cliff,
    every_shape,
    machine,
    machine_of_batches,
    pace,
    sequence,
    step_result,
)

from redrafter_mlx.config import PLAIN, BeamShape
from redrafter_mlx.decoding.sequence import Drafted
from redrafter_mlx.drafting.untrained.continuation import Kind
from redrafter_mlx.drafting.untrained.ngram import Lookup, NgramIndex
from redrafter_mlx.tuning.acceptance import AcceptanceStatistics
from redrafter_mlx.tuning.corrections import Corrections
from redrafter_mlx.tuning.cost import CostModel, candidates
from redrafter_mlx.tuning.policy import TunedPolicy

LATE = 2
"""Steps between the choice of a shape and the first result with it, as in the decoding loop."""

SHORT = 32
"""Steps of a short answer."""


def batches_of(call: Callable[[int], float], drafting: float = 0.3) -> CostModel:
    """Return a machine with measured batches, in milliseconds; more beams cost more to draft."""
    return machine_of_batches(call, lambda w, n: drafting * (1 + 0.1 * w) * (n - 1))


FREE = batches_of(lambda _: 20.0)
LINEAR = batches_of(lambda rows: 20.0 + 5.0 * rows)
CLIFF = batches_of(cliff(16))
MEASURED = {1: 37.5, 2: 34.7, 3: 58.1, 4: 70.7, 6: 75.0, 8: 86.4, 12: 87.8, 16: 93.0, 24: 120.4,
            32: 138.3, 48: 184.6, 64: 235.6, 96: 325.2, 128: 447.9}  # fmt: skip
"""Milliseconds of SmolLM2's call by query rows, on two cores with MKL."""

TWO_CORES = batches_of(lambda rows: next(ms for n, ms in MEASURED.items() if n >= rows), 2.5)
MACHINES = {"free": FREE, "linear": LINEAR, "cliff": CLIFF, "dear": batches_of(cliff(8), 8.0)}


def decode(
    costs: CostModel,
    texts: Sequence[Text],
    steps: int = 120,
    policy: TunedPolicy | None = None,
    dearer: float = 1.0,
    compiling: float = 0.0,
    compiled: set[BeamShape] | None = None,
    slowness: Callable[[int], float] = lambda _: 1.0,
) -> list[Taken]:
    """Run steps of a batch with one row per text; they take the time of `costs`.

    Drafted steps take `dearer` times as long as the policy expects. The first step of a shape that
    is not `compiled` takes longer by the share `compiling`, and reports no time. The policy sees
    times that are `slowness` times as long, by the step's index.
    """
    policy = policy or TunedPolicy(costs, AcceptanceStatistics(candidates(costs, batches=(1, 8))))
    rows, unread, taken = [sequence() for _ in texts], [], []
    compiled = set() if compiled is None else compiled
    for i in range(steps):
        shape = policy.propose(rows).shape
        seconds = costs.step(shape, 128, len(rows)) * (1 if shape == PLAIN else dearer)
        reported = seconds * slowness(i)
        if compiling and shape not in compiled:
            seconds, reported = seconds * (1 + compiling), None
            compiled.add(shape)
        taken.append(Taken(shape, seconds, sum(text.tokens(shape) for text in texts)))
        unread.append([replace(text.step(shape), seconds=reported) for text in texts])
        if len(unread) > LATE:
            policy.learn(rows, unread.pop(0))
    return taken


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("skills", [(0.0, 0.0), (0.9, 0.0, 0.4, 0.8), (0.6,) * 8])
def test_drafting_is_never_slower_than_plain_batches(name: str, skills: tuple[float, ...]) -> None:
    """Except for the two percent that probes may cost, and for the first steps."""
    costs = MACHINES[name]
    steps = decode(costs, [Text(skill, i) for i, skill in enumerate(skills)])[20:]
    plain = len(skills) / costs.step(PLAIN, 128, len(skills))
    assert pace(steps) > 0.97 * plain


@pytest.mark.parametrize("batch", [2, 8])
def test_drafts_that_cost_more_than_was_measured_are_given_up(batch: int) -> None:
    """Plain steps of the same batch reveal it; drafted ones alone could mean a slow machine."""
    texts = [Text(0.6, i) for i in range(batch)]
    believed = [step.shape for step in decode(FREE, texts)[40:]]
    steps = decode(FREE, texts, dearer=4.0)[40:]
    assert PLAIN not in believed
    assert sum(step.shape == PLAIN for step in steps) > 0.9 * len(steps)
    assert pace(steps) > 0.9 * batch / FREE.step(PLAIN, 128, batch)


def test_answers_that_join_a_batch_do_not_make_it_forget_what_drafts_cost() -> None:
    """Eight at once did, and drafts that did not pay were used until they were compared again."""
    times = Corrections()
    for _ in range(9):
        times.of(8).learn(1, 1.0, 1.0)
        times.of(8).learn(1, 1.0, 1.0)
        times.of(8).learn(2, 1.0, 1.5)
    policy = TunedPolicy(FREE, AcceptanceStatistics(candidates(FREE, batches=(1, 8))), times)
    for _ in range(8):
        policy.begin_answer()
    assert 2 in times.of(8).factors
    assert times.of(8).correction(2) == 1.5


def test_drafts_of_a_batch_are_compared_with_plain_steps_in_time() -> None:
    """Plain steps and acceptance are known from earlier; nothing else contradicts the costs."""
    costs, texts = batches_of(lambda _: 100.0), [Text(0.6, i) for i in range(8)]
    acceptance = AcceptanceStatistics(candidates(costs, batches=(1, 8)))
    decode(costs, texts, 120, TunedPolicy(costs, acceptance))
    times = Corrections()
    for _ in range(9):
        times.of(8).learn(1, 1.0, 1.0)
    times = Corrections.from_record(times.to_record())  # another process goes on
    policy = TunedPolicy(costs, acceptance, times)
    steps = decode(costs, texts, 160, policy, dearer=2.5)
    assert sum(step.shape == PLAIN for step in steps[100:]) > 0.8 * len(steps[100:])


def answer(
    costs: CostModel, batch: int, answers: int, dearer: Callable[[int], float]
) -> list[Taken]:
    """Take SHORT steps of one batch after the other, as one process does, from its first step.

    `dearer` is by how much drafted steps cost more than expected, by the answer's index.
    """
    acceptance = AcceptanceStatistics(candidates(costs, batches=(1, 8)))
    times, compiled, taken = Corrections(), set[BeamShape](), list[Taken]()
    for number in range(answers):
        acceptance = acceptance.continued(acceptance.shapes)
        policy = TunedPolicy(costs, acceptance, times)
        texts = [Text(0.55, 100 * number + i) for i in range(batch)]
        factor = dearer(number)
        taken += decode(costs, texts, SHORT, policy, factor, compiling=0.6, compiled=compiled)
    return taken


@pytest.mark.parametrize("batch", [2, 4, 8])
@pytest.mark.parametrize("dearer", [1.0, 1.15, 1.3, 1.5])
def test_short_batches_are_hardly_slower_than_plain_ones(batch: int, dearer: float) -> None:
    """For cheap and expensive drafts; each shape is compiled first."""
    taken = answer(TWO_CORES, batch, 8, lambda _: dearer)
    plain = batch / TWO_CORES.step(PLAIN, 128, batch)
    assert pace(taken) > 0.95 * plain
    assert pace(taken[4 * SHORT :]) > 0.97 * plain


@pytest.mark.parametrize("costs", [TWO_CORES, LINEAR], ids=["two cores", "linear"])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("before", [1.0, 1.5, 2.5])
@pytest.mark.parametrize("after", [1.0, 2.0])
def test_a_change_of_what_drafts_cost_is_noticed(
    costs: CostModel, batch: int, before: float, after: float
) -> None:
    """Such as that of a machine that gets hot, where plain steps take as long as before."""
    taken = answer(costs, batch, 40, lambda number: before if number < 16 else after)
    shapes = (PLAIN, *every_shape(4, 8))
    texts = [Text(0.55) for _ in range(batch)]
    best = max(
        batch * texts[0].tokens(s) / costs.step(s, 128, batch) / (1 if s == PLAIN else after)
        for s in shapes
    )
    assert pace(taken[30 * SHORT :]) > (0.96 if after > 1 else 0.85) * best


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("skill", [0.3, 0.55])
def test_a_machine_that_becomes_slower_for_all_steps_changes_no_shape(
    batch: int, skill: float
) -> None:
    """It is 1 to 2.2 times slower for some 25 to 90 steps; single steps vary by 12%."""
    gained = 0.0
    for seed in range(4):
        rng, slowness = random.Random(seed), list[float]()
        while len(slowness) < 400:
            slowness += [rng.choice([1.0, 1.3, 1.6, 2.2])] * rng.randrange(25, 90)
        texts = [Text(skill, 100 * seed + i) for i in range(batch)]
        steps = decode(
            TWO_CORES,
            texts,
            400,
            slowness=lambda i, s=slowness, r=rng: s[i] * r.lognormvariate(0, 0.12),
        )[60:]
        best = max(
            sum(text.tokens(shape) for text in texts) / TWO_CORES.step(shape, 128, batch)
            for shape in (PLAIN, *every_shape(4, 8))
        )
        gained += pace(steps) / best / 4
    assert gained > (0.97 if batch == 1 else 0.94)


@pytest.mark.parametrize("batch", [1, 2, 4, 8])
def test_where_rows_are_free_every_batch_drafts_large_trees(batch: int) -> None:
    steps = decode(FREE, [Text(0.9, i) for i in range(batch)])[-20:]
    assert min(step.shape.nodes for step in steps) >= 9


@pytest.mark.parametrize("batch", [1, 2, 4, 8])
def test_the_trees_of_all_rows_together_stay_below_a_cliff(batch: int) -> None:
    steps = decode(CLIFF, [Text(0.9, i) for i in range(batch)])[20:]
    rows = [batch * step.shape.nodes for step in steps]
    assert sum(batch < n <= 16 for n in rows) > 0.9 * len(rows)


def test_a_batch_that_fills_the_machine_by_itself_is_decoded_plainly() -> None:
    """Drafts pay for one row, but not for eight rows, which already fill the machine."""
    full = batches_of(lambda rows: 20.0 + 8.0 * max(rows - 6, 0))
    alone, many = (decode(full, [Text(0.7, i) for i in range(n)])[20:] for n in (1, 8))
    assert sum(step.shape != PLAIN for step in alone) > 0.9 * len(alone)
    assert sum(step.shape == PLAIN for step in many) > 0.9 * len(many)


@pytest.mark.parametrize("batch", [2, 4, 8])
def test_the_chosen_shape_is_the_best_of_all_within_three_percent(batch: int) -> None:
    """Acceptance is known; compared with every width, length and capacity."""
    for costs in (LINEAR, CLIFF):
        texts = [Text(0.8, i) for i in range(batch)]
        chosen = decode(costs, texts, 600)[300:]  # shapes that differ by 5% alternate
        best = max(
            batch * texts[0].tokens(s) / costs.step(s, 128, batch) for s in every_shape(4, 8)
        )
        assert pace(chosen) > 0.97 * best


def test_the_largest_batch_decides_and_a_row_that_leaves_frees_its_share() -> None:
    """One policy serves all batch sizes: each step uses the current size."""
    policy = TunedPolicy(CLIFF, AcceptanceStatistics(candidates(CLIFF, batches=(1, 8))))
    taken = [decode(CLIFF, [Text(0.9)] * n, 60, policy)[-20:] for n in (8, 2, 1, 8)]
    nodes = [statistics.mode([step.shape.nodes for step in steps]) for steps in taken]
    assert nodes[0] == nodes[3] <= 2 < nodes[1] <= 8 <= nodes[2] <= 16


def test_what_was_not_measured_costs_in_proportion_to_the_last_that_was() -> None:
    known = machine(cliff(8))
    assert known.verify(16, 16, 8) == pytest.approx(4 * known.verify(32, 128))
    assert known.verify(2, 16, 8) == known.verify(16, 128)
    assert known.drafting(4, 4, 8) == pytest.approx(8 * known.drafting(4, 4))
    assert known.drafting(1, 4, 4) == known.drafting(4, 4)
    assert known.max_nodes == FREE.max_nodes == 32


def test_attention_is_paid_by_every_row_up_to_the_longest() -> None:
    added = LINEAR.verify(4, 2048) - LINEAR.verify(4, 128)
    assert LINEAR.verify(4, 2048, 8) - LINEAR.verify(4, 128, 8) == pytest.approx(8 * added)
    # 1,024 tokens of eight short texts are as many as those of one long text.
    of_seven = LINEAR.verify(4, 8 * 128) - LINEAR.verify(4, 128)
    assert LINEAR.verify(4, 128, 8) - LINEAR.verify(32, 128) == pytest.approx(of_seven)
    long = tuple((rows, seconds + 0.005 * rows) for rows, seconds in LINEAR.short)
    chosen = []
    for lengths in ([128, 128], [128, 8192], [8192, 8192]):
        policy = TunedPolicy(replace(LINEAR, long=long), AcceptanceStatistics([BeamShape(1, 3)]))
        chosen.append(policy.propose([sequence(n) for n in lengths]).shape)
    assert chosen == [BeamShape(1, 3), PLAIN, PLAIN]


def test_measured_batches_change_nothing_for_one_sequence() -> None:
    alone = machine(cliff(8), lambda w, n: 0.3 * (1 + 0.1 * w) * (n - 1))
    measured = batches_of(cliff(8))
    for shape in every_shape():
        assert measured.step(shape, 300) == alone.step(shape, 300)
    assert measured.cliffs() == alone.cliffs()
    assert candidates(measured) == candidates(alone)


def test_a_step_of_a_batch_is_forgotten_as_fast_as_that_of_one_row() -> None:
    shape = BeamShape(1, 2)
    hit, miss = step_result(shape, [0, 0], [0, 1], [0, 1]), step_result(shape, [0] * 2, [0, 1], [0])
    one, four = AcceptanceStatistics([shape]), AcceptanceStatistics([shape])
    for _ in range(40):
        one.learn(hit)
        four.learn(hit, hit, hit, miss)
    assert one.tokens()[0] > 1.99
    assert four.tokens()[0] == pytest.approx(1.75, abs=0.02)


def test_rows_with_a_grammar_or_penalties_tell_nothing_of_others() -> None:
    """They still determine the drafts of their own rows."""
    policy = TunedPolicy(CLIFF, AcceptanceStatistics(candidates(CLIFF)))
    before = policy.acceptance.tokens().tolist()
    rows, text = [sequence(biased=True)], Text(0.0, 1)
    chosen = []
    for _ in range(80):
        shape = policy.propose(rows).shape
        chosen.append(shape)
        policy.learn(rows, [replace(text.step(shape), seconds=CLIFF.step(shape, 128))])
    assert policy.acceptance.tokens().tolist() == before
    assert max(shape.nodes for shape in chosen[:5]) > 2 >= max(s.nodes for s in chosen[-20:])


def test_answers_with_a_grammar_continue_from_what_earlier_ones_learned() -> None:
    first = TunedPolicy(CLIFF, AcceptanceStatistics(candidates(CLIFF)))
    rows, text = [sequence(biased=True)], Text(0.0, 1)
    for _ in range(80):
        shape = first.propose(rows).shape
        first.learn(rows, [replace(text.step(shape), seconds=CLIFF.step(shape, 128))])

    def largest(biased: AcceptanceStatistics | None) -> int:
        first.acceptance.biased = biased
        policy = TunedPolicy(CLIFF, first.acceptance)
        shapes = []
        for _ in range(5):
            policy.learn(rows, [step_result(PLAIN, [0], [0], [0])])
            shapes.append(policy.propose(rows).shape)
        return max(shape.nodes for shape in shapes)

    assert largest(first.acceptance.biased) <= 2 < largest(None)


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_steps_that_cannot_be_timed_are_drafted_all_the_same(batch: int) -> None:
    """They share the device with another group, or with prompts that are read."""
    policy = TunedPolicy(FREE, AcceptanceStatistics(candidates(FREE, batches=(1, 8))))
    rows, texts = [sequence() for _ in range(batch)], [Text(0.9, i) for i in range(batch)]
    shapes = []
    for _ in range(40):
        shapes.append(policy.propose(rows).shape)
        policy.learn(rows, [text.step(shapes[-1]) for text in texts])
    assert PLAIN not in shapes[20:]


def test_an_answer_that_joins_a_batch_copies_again() -> None:
    policy = TunedPolicy(FREE, AcceptanceStatistics(()))
    trust, text = policy.acceptance.trust, repeating(1)
    row = sequence(len(text), NgramIndex(Lookup(), text))
    policy.propose([row])
    for _ in range(40):
        trust.learn("long match", 1.0, 0.0)
    assert policy.revise([row], [Drafted(PLAIN)]) == [None]
    for _ in range(3):
        policy.begin_answer()
    assert policy.revise([row], [Drafted(PLAIN)]) != [None]


def repeating(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(30)] * 4


def test_rows_copy_what_their_own_text_repeats_and_others_keep_their_drafts() -> None:
    policy = TunedPolicy(CLIFF, AcceptanceStatistics(candidates(CLIFF, batches=(1, 8))))
    texts = [repeating(1), list(range(90)), repeating(2)]
    rows = [sequence(len(text), NgramIndex(Lookup(), text)) for text in texts]
    drafted = [Drafted(policy.propose(rows).shape)] * 3
    plans = policy.revise(rows, drafted)
    assert [plan is not None for plan in plans] == [True, False, True]
    for plan, text in zip(plans, texts, strict=True):
        if plan is not None:
            (copy,) = plan.continuations
            assert list(copy.tokens) == (text * 2)[: len(copy.tokens)]


def test_a_row_that_ended_takes_its_planned_copies_along() -> None:
    """Otherwise the next result would be matched with the wrong plan."""

    def trust(*, other: bool) -> float:
        policy = TunedPolicy(FREE, AcceptanceStatistics(()))
        rows = [sequence(120, NgramIndex(Lookup(), repeating(seed))) for seed in (1, 2)]
        policy.propose(rows)
        for row in rows if other else rows[1:]:
            (plan,) = policy.revise([row], [Drafted(PLAIN)])
        assert plan is not None
        nodes = [*range(plan.shape.nodes)]
        policy.learn(
            rows[1:], [step_result(plan.shape, [0] * len(nodes), nodes, [0], from_host=True)]
        )
        policy.learn([], [])
        return policy.acceptance.trust.of("long match")

    assert trust(other=True) == trust(other=False) < 1


def test_copies_of_rows_that_were_cancelled_are_not_kept() -> None:
    """And a result whose plan is no longer known is no error."""
    policy = TunedPolicy(FREE, AcceptanceStatistics(()))
    rows = [sequence(120, NgramIndex(Lookup(), repeating(seed))) for seed in range(1, 6)]
    for row in rows:
        policy.propose([row])
        (plan,) = policy.revise([row], [Drafted(PLAIN)])
        assert plan is not None
    cancelled = weakref.ref(rows.pop(0))
    del row
    gc.collect()
    assert cancelled() is None
    nodes = [*range(8)]
    copied = step_result(BeamShape(1, 8), [0] * 8, nodes, nodes, from_host=True, seconds=0.1)
    for _ in range(3):
        policy.learn(rows[:1], [copied])
    assert policy.acceptance.trust.of("long match") == 1


@pytest.mark.parametrize("batch", [1, 4, 8])
def test_no_copy_is_planned_where_plain_steps_need_not_wait_for_one(batch: int) -> None:
    """For texts of a few different tokens, and copies that were trusted more or less."""
    rng, counts = random.Random(batch), {True: 0, False: 0}
    for _ in range(200):
        policy = TunedPolicy(FREE, AcceptanceStatistics(()))
        held = rng.random()
        for kind in get_args(Kind):
            policy.acceptance.trust.learn(kind, 5.0, 5.0 * held)
        texts = [[rng.randrange(5) for _ in range(rng.randrange(2, 30))] for _ in range(batch)]
        rows = [sequence(len(text), NgramIndex(Lookup(3), text)) for text in texts]
        policy.propose(rows)
        waits = policy.may_revise(rows)
        counts[waits] += 1
        for row in rows:
            row.sources[0].append([rng.randrange(5)])
        if not waits:
            plans = policy.revise(rows, [Drafted(PLAIN)] * batch)
            assert plans == [None] * batch
    assert min(counts.values()) > 10


def test_one_match_in_a_batch_that_hardly_pays_lets_no_row_wait() -> None:
    policy = TunedPolicy(TWO_CORES, AcceptanceStatistics(()))
    matching = sequence(5, NgramIndex(Lookup(3), [1, 2, 3, 1, 2]))
    others = [sequence(9, NgramIndex(Lookup(3), range(9))) for _ in range(7)]
    policy.propose([matching])
    assert policy.may_revise([matching])
    policy.propose([matching, *others])
    assert not policy.may_revise([matching, *others])
