"""Decode one sequence with a policy that chooses the shape of each step, for tests of decoding."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterator

from redrafter_mlx.config import BeamShape
from redrafter_mlx.decoding.pipeline import Pipeline
from redrafter_mlx.decoding.proposal import Policy, Proposal
from redrafter_mlx.decoding.sequence import Sequence
from redrafter_mlx.decoding.sequence_cache import SequenceCache
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.ngram import NgramIndex
from redrafter_mlx.response import StepResult
from redrafter_mlx.speculation.sampling import sequence_keys


class Alternating:
    """A policy that repeats a sequence of shapes, and plans no copies."""

    def __init__(self, *shapes: BeamShape) -> None:
        self.shapes, self.step = shapes, 0

    def propose(self, rows: abc.Sequence[Sequence]) -> Proposal:
        del rows
        self.step += 1
        return Proposal(self.shapes[self.step % len(self.shapes)])

    def revise(self, rows: abc.Sequence[Sequence], *_: object) -> list[Proposal | None]:
        return [None] * len(rows)

    def may_revise(self, rows: abc.Sequence[Sequence]) -> bool:
        del rows
        return False

    def learn(self, *_: object) -> None: ...


def decode_with(
    shapes: Policy,
    decoder: Decoder,
    cache: SequenceCache,
    prompt: list[int],
    finished: Callable[[StepResult], bool],
    seed: int = 0,
) -> Iterator[StepResult]:
    """As `decode`, with these shapes in place of the decoder's own."""
    index = None if decoder.lookup is None else NgramIndex(decoder.lookup, prompt)
    row, batch = Sequence(finished, len(prompt), index), Pipeline(decoder, shapes)
    first = batch.first_shape(row, 1)
    batch.join(row, *decoder.start(cache, 0, [prompt], sequence_keys(seed), first))
    while batch.rows:
        yield batch.advance().results[row]
