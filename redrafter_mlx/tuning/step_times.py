"""Seconds of steps of the decoding loop, as answers take them."""

from __future__ import annotations

import time
from itertools import pairwise

from redrafter_mlx.decoding.single import decode
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.response import StepResult
from redrafter_mlx.speculation.sampling import sequence_keys


def step_times(decoder: Decoder, context: int, count: int) -> list[float]:
    """Return the seconds of `count` steps in a row of the decoding loop, after some tokens."""
    prompt = [(7 * i + 1) % decoder.target.vocab_size for i in range(context)]
    read: list[float] = []

    def finished(_: StepResult) -> bool:
        read.append(time.perf_counter())
        return len(read) == count + 2  # the prompt, and a first step that compiles

    for _ in decode(decoder, decoder.new_cache(), 0, prompt, sequence_keys(0), finished):
        pass
    return [b - a for a, b in pairwise(read[1:])]
