"""The exact joint distribution of short texts, by enumeration."""

from __future__ import annotations

import itertools
import math
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from distributions import chi_square, critical, sampled_probs
from hybrids import hybrid_model
from tiny import random_drafter, random_model

from redrafter_mlx.config import BeamShape, SamplingParams
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.interface import Drafter
from redrafter_mlx.speculation.sampling import sequence_keys
from redrafter_mlx.speculation.tree import Pack, pack_beam
from redrafter_mlx.target_model.cache import slots as cache_slots
from redrafter_mlx.target_model.model import Target

V, N_TOKENS, ROWS = 5, 3, 4_000
PROMPT = [1, 4]


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink the buffers: with thousands of short rows, unused capacity would dominate the cost."""
    monkeypatch.setitem(cache_slots.EXTENT_STEPS, "cpu", 4)
    monkeypatch.setattr("redrafter_mlx.target_model.cache.slots.CAPACITY_STEP", 16)


@cache
def tiny_target(vocabulary: int = V, hybrid: str = "") -> tuple[nn.Module, Target]:
    """Return a model of a layer with attention, or of three of which two keep a state."""
    model = random_model(vocab_size=vocabulary, num_hidden_layers=1)
    if hybrid:
        model = hybrid_model(hybrid, vocab_size=vocabulary, num_hidden_layers=3)
    return model, Target(model)


@cache
def exact_joint(params: SamplingParams, vocabulary: int = V, hybrid: str = "") -> np.ndarray:
    """Return the probability of every sequence of N_TOKENS after the prompt, by enumeration."""
    model, _ = tiny_target(vocabulary, hybrid)
    joint = np.ones((vocabulary,) * N_TOKENS)
    for path in itertools.product(range(vocabulary), repeat=N_TOKENS):
        logits = model(mx.array([[*PROMPT, *path]]))[0, len(PROMPT) - 1 : -1]
        probs = sampled_probs(logits, params)
        joint[path] = math.prod(float(probs[i, token]) for i, token in enumerate(path))
    return joint


def drawn(
    shape: BeamShape,
    params: SamplingParams,
    batches: int,
    drafter: Drafter | None = None,
    vocabulary: int = V,
    pack: Pack = pack_beam,
    hybrid: str = "",
) -> np.ndarray:
    """Return how often each sequence was decoded."""
    _, target = tiny_target(vocabulary, hybrid)
    drafter = drafter or random_drafter(vocab_size=vocabulary).bind(target)
    decoder = Decoder(target, drafter, shape, params, pack=pack)
    counts = np.zeros((vocabulary,) * N_TOKENS)
    for batch in range(batches):
        keys = sequence_keys(batch, ROWS)
        state, output = decoder.start(decoder.new_cache(ROWS), 0, [PROMPT] * ROWS, keys)
        emitted = [r.tokens for r in output.read()]
        while min(map(len, emitted)) < N_TOKENS:
            state, output = decoder.step(state, len(PROMPT) + max(map(len, emitted)))
            for row, result in zip(emitted, output.read(), strict=True):
                row.extend(result.tokens)
        for row in emitted:
            counts[tuple(row[:N_TOKENS])] += 1
    return counts


def fits(
    shape: BeamShape,
    params: SamplingParams,
    batches: int = 3,
    drafter: Drafter | None = None,
    vocabulary: int = V,
    pack: Pack = pack_beam,
    hybrid: str = "",
) -> bool:
    """Whether the decoded sequences fit the exact joint distribution."""
    counts = drawn(shape, params, batches, drafter, vocabulary, pack, hybrid)
    plain = SamplingParams(params.temperature, params.top_p, params.top_k, params.min_p)
    expected = exact_joint(plain, vocabulary, hybrid) * counts.sum()
    statistic, freedom = chi_square(counts.ravel(), expected.ravel())
    return statistic < critical(freedom)
