"""Batches: rows join and leave between steps, and each is decoded as if it were alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from tiny import random_drafter, random_model

from redrafter_mlx.config import PLAIN, BeamShape, SamplingParams
from redrafter_mlx.decoding.batch import Batch
from redrafter_mlx.decoding.copies import FixedShape
from redrafter_mlx.decoding.loop import Decoder
from redrafter_mlx.decoding.row import OwnShapes, Row
from redrafter_mlx.decoding.sequence_cache import SequenceCache
from redrafter_mlx.decoding.step_result import StepResult
from redrafter_mlx.drafting.prompt_lookup import Lookup, TextIndex
from redrafter_mlx.speculation.sampling import sequence_keys
from redrafter_mlx.target.model import Target

FEW = 16
"""A vocabulary of which a random drafter guesses right now and then."""

GREEDY = SamplingParams()


@dataclass
class Decoded:
    """One sequence: what was asked for, and what was emitted."""

    prompt: list[int]
    n: int
    seed: int = 0
    emitted: list[int] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)

    def finished(self, result: StepResult) -> bool:
        self.results.append(result)
        self.emitted.extend(result.tokens)
        return len(self.emitted) >= self.n


def alone(decoder: Decoder, prompt: list[int], n: int, seed: int) -> list[int]:
    """The same sequence by a loop of its own."""
    mine = Decoded(prompt, n)
    for _ in decoder.run(decoder.new_cache(), 0, prompt, sequence_keys(seed), mine.finished):
        pass
    return mine.emitted[:n]


def join(batch: Batch, decoder: Decoder, sequence: Decoded, shape: BeamShape) -> Row:
    index = None if decoder.lookup is None else TextIndex(decoder.lookup, sequence.prompt)
    row = Row(sequence.finished, len(sequence.prompt), index, FixedShape(shape))
    keys, cache = sequence_keys(sequence.seed), decoder.new_cache()
    batch.join(row, *decoder.start(cache, 0, [sequence.prompt], keys, shape))
    return row


def scheduled(
    decoder: Decoder, sequences: Sequence[Decoded], rng: random.Random
) -> list[tuple[Row, SequenceCache]]:
    """Decode the sequences, which join at random steps; returns their rows and caches."""
    batch, waiting, ended = Batch(decoder, OwnShapes()), list(sequences), []
    while waiting or batch.rows:
        while waiting and (not batch.rows or rng.random() < 0.3):
            join(batch, decoder, waiting.pop(0), decoder.shape)
        ended += batch.advance().ended
    return ended


def tiny() -> Target:
    return Target(random_model(vocab_size=FEW))


def some_sequences(rng: random.Random, count: int) -> list[Decoded]:
    return [
        Decoded([rng.randrange(FEW) for _ in range(rng.randrange(1, 9))],
                  rng.randrange(1, 30), rng.randrange(99))
        for _ in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("shape", [PLAIN, BeamShape(1, 4), BeamShape(3, 4)])
@pytest.mark.parametrize("lookup", [None, Lookup(1)])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(1.0, accept="rejection")])
def test_rows_that_join_and_leave_are_decoded_as_if_alone(
    shape: BeamShape, lookup: Lookup | None, params: SamplingParams
) -> None:
    target = tiny()
    for drafter in (random_drafter(vocab_size=FEW).bind(target), None):
        decoder = Decoder(target, drafter, shape, params, lookup=lookup)
        for seed in range(2):
            rng = random.Random(seed)
            sequences = some_sequences(rng, 5)
            ended = scheduled(decoder, sequences, rng)
            assert len(ended) == 5
            for each in sequences:
                assert each.emitted[: each.n] == alone(decoder, each.prompt, each.n, each.seed)
