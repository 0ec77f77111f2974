"""Changing the beam shape at every step, plain steps included, changes no token."""

from __future__ import annotations

import random
from collections import abc

import mlx.core as mx
import numpy as np
import pytest
from decoding import counted_reads, run
from distributions import chi_square, critical
from joint import N_TOKENS, PROMPT, ROWS, V, exact_joint, tiny_target
from tiny import plain_tokens, random_drafter, random_model

from redrafter_mlx.config import PLAIN, AcceptMethod, BeamShape, SamplingParams
from redrafter_mlx.decoding.sequence import Drafted, Proposal, Sequence
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.interface import Drafter
from redrafter_mlx.drafting.oracle import Oracle
from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.response import StepResult
from redrafter_mlx.speculation.sampling import sequence_keys
from redrafter_mlx.target_model.cache import slots as cache_slots
from redrafter_mlx.target_model.model import Target

GREEDY = SamplingParams()
SHAPES = [
    PLAIN,
    *(BeamShape(W, L) for W in range(1, 5) for L in range(2, 6)),
    *(BeamShape(4, 5, nodes) for nodes in (2, 5, 8, 13)),
    BeamShape(1, 5, 3),
]


class Scripted:
    """A policy that chooses at random and records the results it learns from."""

    def __init__(self, seed: int, shapes: abc.Sequence[BeamShape] = SHAPES) -> None:
        self._rng = random.Random(seed)
        self._shapes = shapes
        self.chosen: list[BeamShape] = []
        self.learned: list[StepResult] = []
        self.lengths: list[int] = []

    def propose(self, rows: abc.Sequence[Sequence]) -> Proposal:
        self.lengths += [row.committed for row in rows]
        self.chosen.append(self._rng.choice(self._shapes))
        return Proposal(self.chosen[-1])

    def revise(
        self, rows: abc.Sequence[Sequence], drafted: abc.Sequence[Drafted]
    ) -> list[Proposal | None]:
        """Plan copies of random length, alone or next to the drafts."""
        return [self._plan(*one) for one in zip(rows, drafted, strict=True)]

    def may_revise(self, rows: abc.Sequence[Sequence]) -> bool:
        return any(row.next_continuation(1) for row in rows)

    def learn(self, rows: abc.Sequence[Sequence], steps: abc.Sequence[StepResult]) -> None:
        del rows
        self.learned += steps

    def _plan(self, row: Sequence, drafted: Drafted) -> Proposal | None:
        count = self._rng.choice([0, 1, 3, 7])
        copies = row.continuations(1, count) if count else []
        if not copies:
            return None
        joined = drafted.joinable and self._rng.random() < 0.5
        W, L = (drafted.shape.width + 1, drafted.shape.length) if joined else (1, 1)
        shape = BeamShape(W, max(L, count + 1))
        return Proposal(shape, copies, joined, draft_after=self._rng.random() < 0.8)


@pytest.mark.parametrize("seed", range(2))
def test_tokens_equal_autoregression(seed: int) -> None:
    """Across cache-bucket boundaries, with every accepted length and many changes of shape."""
    model = random_model(seed=3)
    prompt = [i % 97 for i in range(200)]
    text = prompt + plain_tokens(model, prompt, 440)
    decoder = Decoder(Target(model), Oracle(text, 97), PLAIN, GREEDY)
    shapes = Scripted(seed)
    emitted, results = run(decoder, prompt, 400, shapes=shapes)
    assert emitted == text[200:600]
    assert {len(r.tokens) for r in results} == {1, 2, 3, 4, 5}
    assert len({r.shape for r in results}) > 15


@pytest.mark.parametrize("params", [SamplingParams(0.9), SamplingParams(1.1, top_p=0.9, top_k=30)])
def test_a_seed_gives_the_same_tokens_whatever_the_shapes(params: SamplingParams) -> None:
    model = random_model(seed=3)
    target = Target(model)
    plain, _ = run(Decoder(target, None, PLAIN, params), [3, 5, 7], 80, seed=11)
    drafters: list[Drafter] = [Oracle([3, 5, 7, *plain], 97), random_drafter().bind(target)]
    for drafter in drafters:
        for seed in range(2):
            decoder = Decoder(target, drafter, PLAIN, params)
            emitted, _ = run(decoder, [3, 5, 7], 80, seed=11, shapes=Scripted(seed))
            assert emitted == plain


def test_penalties_and_copies_follow_every_change() -> None:
    """Both read the last tokens, in windows that grow with the longest path a step can accept."""
    params = SamplingParams(repetition_penalty=1.3, repetition_context=7)
    model = random_model(seed=3)
    target = Target(model)
    plain, _ = run(Decoder(target, None, PLAIN, params), [3, 5, 7, 3, 5], 120)
    for drafter in (None, random_drafter().bind(target)):
        decoder = Decoder(target, drafter, PLAIN, params, host_drafters=(Lookup(),))
        emitted, _ = run(decoder, [3, 5, 7, 3, 5], 120, shapes=Scripted(1))
        assert emitted == plain


def test_results_carry_the_shape_that_they_were_drafted_with() -> None:
    """A shape is chosen and drafted in one step, verified in the next, and then reported."""
    model = random_model(seed=3)
    text = [3, 5, 7, *plain_tokens(model, [3, 5, 7], 120)]
    shapes = Scripted(0)
    decoder = Decoder(Target(model), Oracle(text, 97), PLAIN, GREEDY)
    _, results = run(decoder, [3, 5, 7], 100, shapes=shapes)
    assert results[0].shape == PLAIN, "the prompt's own"
    assert [r.shape for r in results[1:]] == shapes.chosen[: len(results) - 1]
    # The last result ends the answer, but is reported, too.
    assert shapes.learned == results[1:]
    for r in results:
        assert r.nodes == len(r.depths) <= r.shape.nodes
        assert [r.depths[node] for node in r.path] == list(range(len(r.path)))
        assert all(beam < r.shape.width for beam in r.beams)
        assert len(r.path) == len(r.tokens)
    known = 3  # cache slots: the prompt's, plus the tokens read since
    for length, result in zip(shapes.lengths[2:], results, strict=False):
        known += 0 if result is results[0] else len(result.tokens)
        assert length == known


def test_a_change_of_shape_reads_nothing_more() -> None:
    target = Target(random_model())
    decoder = Decoder(target, random_drafter().bind(target), PLAIN, GREEDY)
    with counted_reads() as counts:
        _, results = run(decoder, [1, 2, 3], 60, shapes=Scripted(2))
    rows = [result.query_rows for result in results]
    lone = [b for a, b, c in zip(rows, rows[1:], rows[2:], strict=False) if b == 1 < min(a, c)]
    assert lone, "a plain step between trees, which is waited for, so that it is timed alone"
    assert counts == {"tolist": len(results), "eval": len(lone)}


@pytest.mark.parametrize(
    "accept", ["sample", pytest.param("rejection", marks=pytest.mark.exhaustive)]
)
def test_the_targets_joint_distribution_is_kept(
    accept: AcceptMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three tokens after a prompt over a vocabulary of 5, another shape at each step."""
    monkeypatch.setitem(cache_slots.EXTENT_STEPS, "cpu", 4)
    monkeypatch.setattr("redrafter_mlx.target_model.cache.slots.CAPACITY_STEP", 16)
    params = SamplingParams(1.0, accept=accept)
    _, target = tiny_target()
    drafter = random_drafter(vocab_size=V).bind(target)
    decoder = Decoder(target, drafter, PLAIN, params)
    shapes = Scripted(5, [PLAIN, BeamShape(1, 3), BeamShape(2, 3), BeamShape(4, 3, 5)])
    counts = np.zeros((V,) * N_TOKENS)
    for batch in range(6):
        keys = sequence_keys(batch, ROWS)
        first = shapes.propose([]).shape
        state, output = decoder.start(decoder.new_cache(ROWS), 0, [PROMPT] * ROWS, keys, first)
        emitted = [r.tokens for r in output.read()]
        while min(map(len, emitted)) < N_TOKENS:
            bound = len(PROMPT) + max(map(len, emitted))
            state, output = decoder.step(state, bound, shapes.propose([]).shape)
            for row, result in zip(emitted, output.read(), strict=True):
                row.extend(result.tokens)
        for row in emitted:
            counts[tuple(row[:N_TOKENS])] += 1
    assert len(set(shapes.chosen)) == 4
    expected = exact_joint(SamplingParams(1.0)) * counts.sum()
    statistic, freedom = chi_square(counts.ravel(), expected.ravel())
    assert statistic < critical(freedom)
    mx.clear_cache()
