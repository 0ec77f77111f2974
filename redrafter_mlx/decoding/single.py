"""Decoding of one sequence to its end, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Generator

import mlx.core as mx

from redrafter_mlx.decoding.batch import Batch
from redrafter_mlx.decoding.constraint import Constraint
from redrafter_mlx.decoding.loop import Decoder
from redrafter_mlx.decoding.row import FixedShape, Row
from redrafter_mlx.decoding.sequence_cache import SequenceCache
from redrafter_mlx.decoding.step_result import StepResult
from redrafter_mlx.drafting.prompt_lookup import TextIndex
from redrafter_mlx.runtime.blas import BLAS


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
    index = None if decoder.lookup is None else TextIndex(decoder.lookup, prompt)
    row = Row(finished, len(prompt), index, constraint)
    batch, lock = Batch(decoder, FixedShape(decoder.shape)), decoder.target.lock
    with BLAS.threads_by_rows():
        with lock:
            first = decoder.start(cache, start, [prompt], keys, constraints=[constraint])
            batch.join(row, *first)
        while batch.rows:
            with lock:
                advanced = batch.advance()
            yield advanced.results[row]
