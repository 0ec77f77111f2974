"""Decode one sequence with a policy that chooses the shape of each step, for tests of decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from redrafter_mlx.config import BeamShape
from redrafter_mlx.decoding.batch import Batch
from redrafter_mlx.decoding.copies import CopyPlan
from redrafter_mlx.decoding.loop import Decoder
from redrafter_mlx.decoding.row import BatchShapes, Row
from redrafter_mlx.decoding.sequence_cache import SequenceCache
from redrafter_mlx.decoding.step_result import StepResult
from redrafter_mlx.drafting.prompt_lookup import TextIndex
from redrafter_mlx.speculation.sampling import sequence_keys


class Alternating:
    """A policy that repeats a sequence of shapes, and plans no copies."""

    def __init__(self, *shapes: BeamShape) -> None:
        self.shapes, self.step = shapes, 0

    def next_shape(self, rows: Sequence[Row]) -> BeamShape:
        del rows
        self.step += 1
        return self.shapes[self.step % len(self.shapes)]

    def plan_copies(self, rows: Sequence[Row], *_: object) -> list[CopyPlan | None]:
        return [None] * len(rows)

    def may_copy(self, rows: Sequence[Row]) -> bool:
        del rows
        return False

    def learn(self, *_: object) -> None: ...


def decode_with(
    shapes: BatchShapes,
    decoder: Decoder,
    cache: SequenceCache,
    prompt: list[int],
    finished: Callable[[StepResult], bool],
    seed: int = 0,
) -> Iterator[StepResult]:
    """As `decode`, with these shapes in place of the decoder's own."""
    index = None if decoder.lookup is None else TextIndex(decoder.lookup, prompt)
    row, batch = Row(finished, len(prompt), index), Batch(decoder, shapes)
    first = batch.first_shape(row, 1)
    batch.join(row, *decoder.start(cache, 0, [prompt], sequence_keys(seed), first))
    while batch.rows:
        yield batch.advance().results[row]
