"""Sampled choices: the target's distribution, mlx-lm's filters, and the guarantee of a seed."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest
from decoding import SHAPES, run
from distributions import chi_square, critical, sampled_probs
from mlx_lm.sample_utils import make_sampler
from tiny import random_drafter, random_model

from redrafter_mlx.bench.programs.on_paper import operations
from redrafter_mlx.config import BeamShape, SamplingParams
from redrafter_mlx.decoding.single import decode
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.oracle import Oracle
from redrafter_mlx.speculation.sampling import (
    choose,
    filtered_logits,
    sampled_log_probs,
    sequence_keys,
)
from redrafter_mlx.target_model.model import Target

FILTERS = [
    {},
    {"top_p": 0.7},
    {"top_k": 5},
    {"min_p": 0.2},
    {"top_p": 0.9, "top_k": 8, "min_p": 0.05},
]


def kept_by_mlx_lm(logits: mx.array, params: SamplingParams) -> set[int]:
    """Return the tokens that mlx-lm's own sampler draws at least once in many draws."""
    sampler = make_sampler(
        params.temperature, top_p=params.top_p, min_p=params.min_p, top_k=params.top_k
    )
    mx.random.seed(0)
    log_probs = logits - mx.logsumexp(logits)
    return set(sampler(mx.broadcast_to(log_probs, (20_000, logits.size))).tolist())


@pytest.mark.parametrize("filters", FILTERS)
def test_filters_keep_the_tokens_that_mlx_lm_keeps(filters: dict) -> None:
    mx.random.seed(7)
    logits = mx.random.normal((24,)) * 2
    params = SamplingParams(3.0, **filters)  # hot, so that every remaining token is drawn
    ours = np.isfinite(np.array(filtered_logits(logits, params)))
    assert set(np.flatnonzero(ours).tolist()) == kept_by_mlx_lm(logits, params)


@pytest.mark.parametrize("top_p", [1e-9, 1e-40, 5e-324])
def test_the_lowest_top_p_keeps_the_likeliest_token_of_every_node(top_p: float) -> None:
    logits = mx.random.normal((3, 50), key=mx.random.key(0))
    left = np.isfinite(np.array(filtered_logits(logits, SamplingParams(1.0, top_p=top_p))))
    assert left.sum(-1).tolist() == [1, 1, 1]
    assert left.argmax(-1).tolist() == mx.argmax(logits, -1).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("filters", FILTERS)
def test_probabilities_are_those_of_the_reference(temperature: float, filters: dict) -> None:
    mx.random.seed(11)
    logits, params = mx.random.normal((6, 40)) * 2, SamplingParams(temperature, **filters)
    want = sampled_probs(logits, params)
    assert (want == 0).any() == bool(filters)
    np.testing.assert_allclose(np.exp(sampled_log_probs(logits, params)), want, rtol=1e-4)


def test_a_draw_without_filters_normalises_nothing() -> None:
    """Normalisation would be a needless pass over the vocabulary for every node."""
    logits, keys = mx.random.normal((1, 3, 24), key=mx.random.key(0)), sequence_keys(1)
    at = mx.arange(3)[None], mx.array([5]), keys
    drawn = operations([choose(logits, *at, SamplingParams(0.7), 2)])
    assert "LogSumExp" not in drawn
    filtered = operations([choose(logits, *at, SamplingParams(0.7, top_p=0.9), 2)])
    assert "LogSumExp" in filtered


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("filters", FILTERS)
def test_choices_follow_the_filtered_distribution(temperature: float, filters: dict) -> None:
    mx.random.seed(3)
    draws, logits = 20_000, mx.random.normal((16,)) * 0.6
    params = SamplingParams(temperature, **filters)
    chosen = choose(
        mx.broadcast_to(logits, (draws, 1, 16)),
        mx.zeros((draws, 1), mx.int32),
        mx.full((draws,), 9),
        sequence_keys(5, draws),
        params,
        0,
    )
    expected = sampled_probs(logits, params) * draws
    statistic, freedom = chi_square(np.bincount(np.array(chosen)[:, 0], minlength=16), expected)
    assert statistic < critical(freedom)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "params", [SamplingParams(0.8), SamplingParams(1.2, top_p=0.9, top_k=20, min_p=0.02)]
)
def test_a_seed_gives_the_same_text_with_drafts_and_without(
    seed: int, params: SamplingParams
) -> None:
    model = random_model()
    target = Target(model)
    alone = Decoder(target, None, BeamShape(1, 1), params)
    want, _ = run(alone, [3, 5, 7], 60, seed)
    oracle = Oracle([3, 5, 7, *want], 97)
    for shape in SHAPES[1::3]:
        got, _ = run(Decoder(target, oracle, shape, params), [3, 5, 7], 40, seed)
        assert got == want[:40], shape


def test_seeds_and_rows_differ() -> None:
    logits = mx.zeros((4, 1, 97))
    depths, at = mx.zeros((4, 1), mx.int32), mx.full((4,), 5)
    draw = [
        tuple(
            choose(logits, depths, at, sequence_keys(s, 4), SamplingParams(1.0), 0)[:, 0].tolist()
        )
        for s in range(4)
    ]
    assert len(set(draw)) == 4
    assert all(len(set(row)) > 1 for row in draw)


def test_neighbouring_positions_are_independent_of_neighbouring_seeds() -> None:
    """Seed s at position p + 1 must not repeat seed s + 1 at position p."""
    logits, depths = mx.zeros((1, 4, 97)), mx.arange(4)[None]
    rows = [
        choose(logits, depths, mx.array([0]), sequence_keys(s), SamplingParams(1.0), 3)[0].tolist()
        for s in range(3)
    ]
    assert rows[0][1:] != rows[1][:-1]
    assert rows[1][1:] != rows[2][:-1]


def test_generators_that_run_interleaved_do_not_disturb_each_other() -> None:
    target = Target(random_model())
    params = SamplingParams(1.0)
    decoder = Decoder(target, random_drafter().bind(target), BeamShape(2, 3), params)
    want = [run(decoder, [3, 5], 30, seed)[0] for seed in (1, 2)]
    emitted: list[list[int]] = [[], []]

    def start(i: int) -> object:
        def finished(result: object) -> bool:
            emitted[i].extend(result.tokens)  # type: ignore[attr-defined]
            return len(emitted[i]) >= 30

        return decode(decoder, decoder.new_cache(), 0, [3, 5], sequence_keys(i + 1), finished)

    for _ in itertools.zip_longest(start(0), start(1)):  # type: ignore[call-overload]
        mx.random.seed(0)
    assert [row[:30] for row in emitted] == want
