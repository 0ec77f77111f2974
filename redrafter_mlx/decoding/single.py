"""Decoding of one sequence to its end, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Generator

import mlx.core as mx

from redrafter_mlx.decoding.cache.sequence_cache import SequenceCache
from redrafter_mlx.decoding.constraint import Constraint
from redrafter_mlx.decoding.pipeline import Pipeline
from redrafter_mlx.decoding.sequence import FixedPolicy, Policy, Sequence
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.response import StepResult


def decode(
    decoder: Decoder,
    cache: SequenceCache,
    start: int,
    prompt: list[int],
    keys: mx.array,
    on_result: Callable[[StepResult], bool],
    constraint: Constraint | None = None,
    policy: Policy | None = None,
) -> Generator[StepResult, None, None]:
    """Decode one sequence; the cache already holds the first `start` tokens of its prompt.

    Yield the prompt's result, then one result per step, until `on_result` returns True; nothing is
    computed after that. The target's lock is not held across a yield. Closing the iterator leaves
    the cache ready to be kept.

    constraint: is advanced by `on_result`
    policy:     None drafts the decoder's shape in every step
    """
    sources = decoder.begin_sources()
    for source in sources:
        source.append(prompt)
    sequence = Sequence(on_result, len(prompt), sources, constraint)
    pipeline, lock = Pipeline(decoder, policy or FixedPolicy(decoder.shape)), decoder.target.lock
    with decoder.target.in_use():
        with lock:
            shape = pipeline.first_shape(sequence, 1)
            first = decoder.start(cache, start, [prompt], keys, shape, [constraint])
            pipeline.join(sequence, *first)
        while pipeline.sequences:
            with lock:
                advanced = pipeline.advance()
            yield advanced.results[sequence]
