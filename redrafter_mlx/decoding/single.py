"""Decoding of one sequence to its end, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Generator

import mlx.core as mx

from redrafter_mlx.decoding.constraint import Constraint
from redrafter_mlx.decoding.pipeline import Pipeline
from redrafter_mlx.decoding.proposal import FixedPolicy
from redrafter_mlx.decoding.sequence import Sequence
from redrafter_mlx.decoding.sequence_cache import SequenceCache
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.ngram import NgramIndex
from redrafter_mlx.response import StepResult


def decode(
    decoder: Decoder,
    cache: SequenceCache,
    start: int,
    prompt: list[int],
    keys: mx.array,
    finished: Callable[[StepResult], bool],
    constraint: Constraint | None = None,
) -> Generator[StepResult, None, None]:
    """Decode one sequence; the cache already holds the first `start` tokens of its prompt.

    Yield the prompt's result, then one result per step, until `finished` returns True; nothing is
    computed after that. The target's lock is not held across a yield. Closing the iterator leaves
    the cache ready to be kept. `finished` advances the `constraint`.
    """
    index = None if decoder.lookup is None else NgramIndex(decoder.lookup, prompt)
    row = Sequence(finished, len(prompt), index, constraint)
    batch, lock = Pipeline(decoder, FixedPolicy(decoder.shape)), decoder.target.lock
    with decoder.target.in_use():
        with lock:
            first = decoder.start(cache, start, [prompt], keys, constraints=[constraint])
            batch.join(row, *first)
        while batch.rows:
            with lock:
                advanced = batch.advance()
            yield advanced.results[row]
