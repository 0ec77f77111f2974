"""Batches: rows join and leave between steps, and each is decoded as if it were alone."""

from __future__ import annotations

import random
from collections import abc
from dataclasses import replace
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from batches import (
    FEW,
    GREEDY,
    VARIOUS,
    Decoded,
    drafted,
    finish,
    follow_a_random_schedule,
    scheduled,
    some,
    tiny,
)
from distributions import chi_square, critical, sampled_probs
from tiny import byte_tokenizer, random_model, truncated

from redrafter_mlx.config import PLAIN, BeamShape, SamplingParams
from redrafter_mlx.decoding.pipeline import Pipeline
from redrafter_mlx.decoding.sequence import FixedPolicy, Proposal, Sequence, Status
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.draft_model import DraftModel
from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.response import StepResult
from redrafter_mlx.speculation.sampling import penalised, sequence_keys
from redrafter_mlx.speculation.tree import TokenTree
from redrafter_mlx.target_model.cache import slots as cache_slots
from redrafter_mlx.target_model.cache.kv_cache import TreeCache
from redrafter_mlx.target_model.cache.slots import CAPACITY_STEP
from redrafter_mlx.target_model.model import Target


@pytest.mark.parametrize("shape", [PLAIN, BeamShape(1, 4), BeamShape(3, 4)])
@pytest.mark.parametrize("host", [(), (Lookup(1),)])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(1.0, accept="rejection")])
def test_rows_that_join_and_leave_are_decoded_as_if_alone(
    shape: BeamShape, host: tuple[Lookup, ...], params: SamplingParams
) -> None:
    """Compares tokens and steps: what each row accepts does not depend on the others."""
    decoder = replace(drafted(tiny(layers=1), shape, params), host_drafters=host)
    rng = random.Random(5)
    sequences = some(rng, 5, [params])
    assert len(scheduled(decoder, sequences, rng)) == 5
    for each in sequences:
        want = [r.tokens for r in each.alone(decoder).results]
        assert [r.tokens for r in each.results] == want


def test_random_schedules_give_every_row_its_own_tokens() -> None:
    target = tiny(layers=1)
    for seed in range(8):
        follow_a_random_schedule(drafted(target, BeamShape(2, 3)), seed)


@pytest.mark.exhaustive
def test_a_thousand_random_schedules_give_every_row_its_own_tokens() -> None:
    target = tiny(layers=1)
    shapes = [PLAIN, BeamShape(1, 3), BeamShape(2, 3), BeamShape(3, 4)]
    for seed in range(1000):
        follow_a_random_schedule(drafted(target, shapes[seed % len(shapes)]), seed)


def test_rows_of_one_step_accept_different_numbers_of_tokens() -> None:
    """Otherwise the smallest number would bound all rows, which is correct but useless."""
    decoder = drafted(tiny(), BeamShape(3, 4))
    batch = Pipeline(decoder, FixedPolicy(decoder.shape))
    sequences = [Decoded([n, 5, 7], 30) for n in range(4)]
    for each in sequences:
        each.join(batch, decoder)
    counts = []
    while len(batch.sequences) == 4:
        results = batch.advance().results
        counts.append({len(result.tokens) for result in results.values()})
    assert any(len(lengths) > 1 for lengths in counts)


@pytest.mark.parametrize("shape", [PLAIN, BeamShape(3, 4)])
def test_dead_slots_move_no_output(shape: BeamShape) -> None:
    """Every slot beyond a row's own text is filled with large values before each step."""
    decoder = drafted(tiny(), shape)
    sequences = [Decoded([1], 25), Decoded([2] * 9, 20), Decoded([4, 5, 6], 15)]
    batch = Pipeline(decoder, FixedPolicy(decoder.shape))
    rows = [each.join(batch, decoder) for each in sequences]
    honest = decoder.target.verify

    def filled(
        tree: TokenTree, cache: TreeCache, length: mx.array, bound: int, compiled: bool
    ) -> tuple[mx.array, mx.array]:
        cache.flush()
        dead = mx.arange(cache.capacity)[None] >= length[:, None]
        for layer in cache.layers:
            layer.keys = mx.where(dead[:, None, :, None], 1e4, layer.keys)
            layer.values = mx.where(dead[:, None, :, None], -1e4, layer.values)
        return honest(tree, cache, length, bound, compiled)

    decoder.target.verify = filled  # type: ignore[method-assign, assignment]
    finish(batch)
    del decoder.target.verify
    assert all(row.status is Status.FINISHED for row in rows)
    for each in sequences:
        assert each.emitted == each.alone(decoder).emitted


def test_four_rows_with_parameters_of_their_own_draw_from_their_own_distributions() -> None:
    """Samples the token after a root, again and again, in a drafted batch of four rows."""
    target, prompt = tiny(layers=1), [3, 5]
    decoder = drafted(target, BeamShape(2, 3))
    params = [SamplingParams(0.6), SamplingParams(1.0, top_k=4), SamplingParams(1.3, top_p=0.8),
              SamplingParams(1.0, min_p=0.1, logit_bias=((3, 1.0),))]  # fmt: skip
    rows = len(params)
    counts = np.zeros((rows, FEW))
    for seed in range(400):
        cache = decoder.new_cache(rows)
        state, output = decoder.start(cache, 0, [prompt] * rows, sequence_keys(seed, rows))
        root = output.read()[0].tokens[0]
        state.sampling = tuple(params)
        _, output = decoder.step(state, len(prompt))
        for count, result in zip(counts, output.read(), strict=True):
            count[result.tokens[0]] += 1
    logits = target.model(mx.array([[*prompt, root]]))[:, -1:]
    for count, p in zip(counts, params, strict=True):
        probs = sampled_probs(penalised(logits, None, p), p)[0, 0]
        statistic, freedom = chi_square(count, probs * count.sum())
        assert statistic < critical(freedom)


@pytest.mark.parametrize("form", ["draft model", "lookup and draft model"])
def test_drafters_that_remember_follow_their_rows(form: str) -> None:
    model = random_model(vocab_size=258, num_hidden_layers=2)
    target = Target(model)
    small = DraftModel(truncated(model, 1), byte_tokenizer()).bind(target, byte_tokenizer())
    host = (Lookup(1),) if form.startswith("lookup") else ()
    decoder = Decoder(target, small, BeamShape(2, 4), GREEDY, host_drafters=host)
    rng = random.Random(1)
    sequences = some(rng, 4, [GREEDY])
    scheduled(decoder, sequences, rng)
    for each in sequences:
        want = [r.tokens for r in each.alone(decoder).results]
        assert [r.tokens for r in each.results] == want


def test_rows_give_up_the_slots_of_a_long_text_that_has_left() -> None:
    """In the target's cache and the drafter's, so that a row that joins later has none either."""
    model = random_model(vocab_size=258, num_hidden_layers=2)
    target = Target(model)
    small = DraftModel(truncated(model, 1), byte_tokenizer()).bind(target, byte_tokenizer())
    decoder = Decoder(target, small, BeamShape(1, 3), GREEDY)
    batch = Pipeline(decoder, FixedPolicy(decoder.shape))
    short, long = Decoded([1, 2, 3], 60), Decoded([i % 258 for i in range(1000)], 4)
    rows = [each.join(batch, decoder) for each in (short, long)]
    held = []
    while batch.sequences:
        ended = batch.advance().ended
        if rows[1].status is Status.FINISHED:
            held += [batch.slots] if batch.sequences else []
            held += [
                keys.shape[2] for row, cache in ended if row is rows[0] for keys, _ in cache.memory
            ]
    assert len(held) > 0
    assert max(held) <= 2 * CAPACITY_STEP
    assert short.emitted == short.alone(decoder).emitted


@pytest.mark.parametrize(("backend", "graphs"), [("cpu", 5), ("apple", 2), ("cuda", 3)])
def test_graphs_are_built_for_each_extent_alone(
    backend: str, graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few on a GPU; none of them serves only the step in which the buffers grow."""
    monkeypatch.setattr(cache_slots, "backend", lambda: backend)
    decoder = Decoder(tiny(), None, PLAIN, GREEDY)
    sequence, batch = Decoded([1, 2, 3], 280), Pipeline(decoder, FixedPolicy(decoder.shape))
    sequence.join(batch, decoder)
    finish(batch)
    assert decoder.target.compiled == graphs


def test_a_batch_size_is_compiled_when_it_has_come_some_times() -> None:
    """Where answers join and leave, many sizes come only once or twice."""
    decoder = Decoder(tiny(), None, PLAIN, GREEDY)
    batch = Pipeline(decoder, FixedPolicy(decoder.shape))
    for seed in range(3):
        Decoded([1, 2, 3], 20, seed).join(batch, decoder)
    compiled = []
    for _ in range(8):
        batch.advance()
        compiled.append(decoder.target.compiled)
    assert compiled == [0, 0, 0, 0, 1, 1, 1, 1]


def test_no_time_is_reported_of_a_step_beside_which_a_graph_was_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither the step that is read late meanwhile nor the first step of the new graph is timed."""
    monkeypatch.setattr(cache_slots, "backend", lambda: "cpu")
    decoder = Decoder(tiny(), None, PLAIN, GREEDY)
    sequence, batch = Decoded([1, 2, 3], 240), Pipeline(decoder, FixedPolicy(decoder.shape))
    sequence.join(batch, decoder)
    compiled = []
    while batch.sequences:
        before = decoder.target.compiled
        batch.advance()
        compiled.append(decoder.target.compiled > before)
    timed = [result.seconds is not None for result in sequence.results]
    assert not timed[0], "the prompt's"
    assert timed[1:] == [not (here or there) for here, there in pairwise(compiled)]
    assert sum(compiled) == 4, "an extent of 64 slots each"


class Recording(FixedPolicy):
    """A fixed shape; keeps the steps that it is told of each sequence."""

    def __init__(self, shape: BeamShape) -> None:
        super().__init__(shape)
        self.told = dict[Sequence, list[StepResult]]()

    def learn(self, rows: abc.Sequence[Sequence], steps: abc.Sequence[StepResult]) -> None:
        for row, step in zip(rows, steps, strict=True):
            self.told.setdefault(row, []).append(step)
        super().learn(rows, steps)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("shape", [PLAIN, BeamShape(3, 4)])
def test_sequences_that_are_paused_go_on_as_if_alone(shape: BeamShape, ahead: bool) -> None:
    """At random steps, one or all of a batch; while they are paused, they take no steps.

    The policy is told of all that they take: what it proposes depends on it, and by rejection, the
    text of a seed depends on what is proposed.
    """
    target = tiny()
    target.submits_ahead = ahead
    decoder = replace(drafted(target, shape), host_drafters=(Lookup(1),))
    for seed in range(6):
        rng = random.Random(seed)
        sequences = some(rng, 3, VARIOUS)
        policy = Recording(shape)
        batch = Pipeline(decoder, policy)
        rows = [each.join(batch, decoder) for each in sequences]
        while batch.sequences:
            paused = [row for row in rows if row.status is Status.PAUSED]
            for row in rows:
                if row.status in (Status.RUNNING, Status.PAUSED):
                    row.status = Status.PAUSED if rng.random() < 0.4 else Status.RUNNING
            still = [row for row in paused if row.status is Status.PAUSED]
            most = batch.slots + batch.growth
            assert not set(batch.advance().results) & {*still}
            assert batch.slots <= most, "more than was foreseen"
        for each in sequences:
            want = [r.tokens for r in each.alone(decoder).results]
            assert [r.tokens for r in each.results] == want
        for row, each in zip(rows, sequences, strict=True):
            assert policy.told.get(row, []) == each.results[1:]


class Counting(FixedPolicy):
    """A fixed shape; counts the choices, and keeps the times that it is told."""

    def __init__(self, shape: BeamShape) -> None:
        super().__init__(shape)
        self.choices, self.timed = 0, list[bool]()

    def propose(self, rows: abc.Sequence[Sequence]) -> Proposal:
        self.choices += 1
        return super().propose(rows)

    def learn(self, rows: abc.Sequence[Sequence], steps: abc.Sequence[StepResult]) -> None:
        self.timed += [step.seconds is not None for step in steps[:1]]
        super().learn(rows, steps)


def test_answers_that_begin_together_choose_their_first_shape_once() -> None:
    """A choice may pay for a probe, or count as one of the plain steps that time a batch."""
    decoder = drafted(tiny(), BeamShape(1, 3))
    shapes = Counting(decoder.shape)
    batch = Pipeline(decoder, shapes)
    for _ in range(2):
        rows = [Sequence(lambda _: False, 3) for _ in range(3)]
        shapes.choices = 0
        assert [batch.first_shape(row, 3) for row in rows] == [decoder.shape] * 3
        assert shapes.choices == 1
        sequences = [Decoded([1, 2, 3], 3, seed) for seed in range(3)]
        for sequence in sequences:
            sequence.join(batch, decoder)
        assert batch.first_shape(rows[0], 3) == decoder.shape
        finish(batch)


def test_no_time_is_reported_of_a_step_with_a_row_that_was_cancelled() -> None:
    """It would be taken for a step of the other rows alone."""
    decoder = drafted(tiny(), BeamShape(1, 3))
    shapes = Counting(decoder.shape)
    batch = Pipeline(decoder, shapes)
    rows = [Decoded([1, 2, 3], 90, seed).join(batch, decoder) for seed in range(3)]
    while not any(shapes.timed[-3:]):
        batch.advance()
    rows[0].status = Status.FINISHED
    batch.advance()
    assert not shapes.timed[-1]
    while not shapes.timed[-1]:
        batch.advance()
    assert len(batch.sequences) == 2
