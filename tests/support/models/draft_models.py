"""Draft models for tiny targets."""

from __future__ import annotations

from collections.abc import Sequence

import decoding
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from joint import small_buffers as small_buffers
from policies import Alternating
from tiny import Words, plain_tokens

from redrafter_mlx.config import BeamShape, SamplingParams
from redrafter_mlx.decoding.cache.sequence_cache import SequenceCache
from redrafter_mlx.decoding.sequence import Policy
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.draft_model import DraftModel
from redrafter_mlx.response import StepResult
from redrafter_mlx.target_model.model import Target

GREEDY = SamplingParams()
PROMPT = [3, 5, 7, 11, 4, 2, 9, 1]


def drafter_for(target: Target, model: nn.Module) -> DraftModel:
    words = Words(target.vocab_size)
    return DraftModel(model, words).bind(target, words)  # type: ignore[arg-type]


def decoder_with(
    model: nn.Module, small: nn.Module, shape: BeamShape, params: SamplingParams = GREEDY
) -> Decoder:
    """Return a decoder of a model, for which a smaller one drafts."""
    target = Target(model)
    return Decoder(target, drafter_for(target, small), shape, params)


def run(
    decoder: Decoder, n: int, seed: int = 0, shapes: Policy | None = None
) -> tuple[list[int], list[StepResult], SequenceCache]:
    cache = decoder.new_cache()
    return *decoding.run(decoder, PROMPT, n, seed, shapes=shapes, cache=cache), cache


def remembers_the_text(
    decoder: Decoder, model: nn.Module, small: nn.Module, n: int, shapes: Sequence[BeamShape]
) -> None:
    """Check the memory of a draft model after `n` tokens against a fresh prefill of the text."""
    emitted, _, cache = run(decoder, n, shapes=Alternating(*shapes))
    cache.catch_up(decoder.drafter)
    known = int(cache.remembered.item())  # type: ignore[union-attr]
    assert len(PROMPT) + n - 1 <= known <= len(PROMPT) + n + 5
    text = [*PROMPT, *plain_tokens(model, PROMPT, n + 10)]
    assert text[: len(PROMPT) + n] == [*PROMPT, *emitted]
    want = Target(small).new_cache()
    Target(small).append(mx.array([text[:known]]), want, 0)
    for pair, layer in zip(cache.memory, want.layers, strict=True):
        for got, expected in zip(pair, (layer.keys, layer.values), strict=True):
            assert expected is not None
            np.testing.assert_allclose(
                got[:, :, :known], expected[:, :, :known], rtol=1e-4, atol=1e-5
            )
