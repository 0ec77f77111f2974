"""Draft models for tiny targets."""

from __future__ import annotations

import decoding
import mlx.nn as nn
from joint import small_buffers as small_buffers
from tiny import Words

from redrafter_mlx.config import SamplingParams
from redrafter_mlx.decoding.cache.sequence_cache import SequenceCache
from redrafter_mlx.decoding.proposal import Policy
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.draft_model import DraftModel
from redrafter_mlx.response import StepResult
from redrafter_mlx.target_model.model import Target

GREEDY = SamplingParams()


PROMPT = [3, 5, 7, 11, 4, 2, 9, 1]


def drafter_for(target: Target, model: nn.Module) -> DraftModel:
    words = Words(target.vocab_size)
    return DraftModel(model, words).bind(target, words)  # type: ignore[arg-type]


def run(
    decoder: Decoder, n: int, seed: int = 0, shapes: Policy | None = None
) -> tuple[list[int], list[StepResult], SequenceCache]:
    cache = decoder.new_cache()
    return *decoding.run(decoder, PROMPT, n, seed, shapes=shapes, cache=cache), cache
