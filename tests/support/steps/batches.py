"""Rows of a batch that join and leave at random, each beside its own decoding."""

from __future__ import annotations

import random
from collections import abc
from dataclasses import dataclass, field, replace

from tiny import random_drafter, random_model

from redrafter_mlx.config import BeamShape, SamplingParams
from redrafter_mlx.decoding.pipeline import Pipeline
from redrafter_mlx.decoding.sequence import FixedPolicy, Sequence, Status
from redrafter_mlx.decoding.single import decode
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.response import StepResult
from redrafter_mlx.speculation.sampling import sequence_keys
from redrafter_mlx.target_model.model import Target

FEW = 16
"""Size of a vocabulary that is small enough for a random drafter to be right sometimes."""


GREEDY = SamplingParams()


@dataclass
class Decoded:
    """One sequence: its options, and what it emitted."""

    prompt: list[int]
    n: int
    seed: int = 0
    params: SamplingParams = GREEDY
    emitted: list[int] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)

    def finished(self, result: StepResult) -> bool:
        self.results.append(result)
        self.emitted.extend(result.tokens)
        return len(self.emitted) >= self.n

    def join(self, batch: Pipeline, decoder: Decoder, kind: type[Sequence] = Sequence) -> Sequence:
        sources = decoder.begin_sources()
        for source in sources:
            source.append(self.prompt)
        row = kind(self.finished, len(self.prompt), sources)
        mine = replace(decoder, sampling=self.params)
        keys = sequence_keys(self.seed)
        batch.join(row, *mine.start(decoder.new_cache(), 0, [self.prompt], keys))
        return row

    def alone(self, decoder: Decoder) -> Decoded:
        """Decode the same sequence alone."""
        mine = Decoded(self.prompt, self.n, self.seed, self.params)
        decoder = replace(decoder, sampling=self.params)
        keys = sequence_keys(self.seed)
        for _ in decode(decoder, decoder.new_cache(), 0, self.prompt, keys, mine.finished):
            pass
        return mine


def finish(batch: Pipeline) -> None:
    """Advance a batch until all of its rows have ended."""
    while batch.sequences:
        batch.advance()


def decode_together(decoder: Decoder, rows: abc.Sequence[Decoded]) -> None:
    """Decode rows that join a batch one after another, each a step after the one before."""
    batch = Pipeline(decoder, FixedPolicy(decoder.shape))
    for row in rows:
        row.join(batch, decoder)
        batch.advance()
    finish(batch)


def scheduled(
    decoder: Decoder, sequences: abc.Sequence[Decoded], rng: random.Random
) -> list[Sequence]:
    """Decode the sequences, which join at random steps; return their rows as they end."""
    batch, waiting, ended = Pipeline(decoder, FixedPolicy(decoder.shape)), list(sequences), []
    while waiting or batch.sequences:
        while waiting and (not batch.sequences or rng.random() < 0.3):
            waiting.pop(0).join(batch, decoder)
        ended += [row for row, _ in batch.advance().ended]
    return ended


def some(rng: random.Random, count: int, params: abc.Sequence[SamplingParams]) -> list[Decoded]:
    """Return sequences of random prompts and lengths."""
    return [
        Decoded([rng.randrange(FEW) for _ in range(rng.randrange(1, 9))],
                rng.randrange(1, 30), rng.randrange(99), rng.choice(params))
        for _ in range(count)
    ]  # fmt: skip


def tiny(layers: int = 2) -> Target:
    return Target(random_model(vocab_size=FEW, num_hidden_layers=layers))


def drafted(target: Target, shape: BeamShape, params: SamplingParams = GREEDY) -> Decoder:
    return Decoder(target, random_drafter(vocab_size=FEW).bind(target), shape, params)


VARIOUS = [
    GREEDY,
    SamplingParams(repetition_penalty=1.3, repetition_context=3),
    SamplingParams(0.7),
    SamplingParams(1.0, top_k=5, logit_bias=((3, 2.0),)),
    SamplingParams(1.2, min_p=0.05, repetition_penalty=1.2),
    SamplingParams(1.0, accept="typical"),
]


def follow_a_random_schedule(decoder: Decoder, seed: int) -> None:
    """Run sequences with different parameters that join, leave early, and end."""
    rng = random.Random(seed)
    sequences = some(rng, rng.randrange(2, 6), VARIOUS)
    batch, waiting = Pipeline(decoder, FixedPolicy(decoder.shape)), list(sequences)
    rows: list[Sequence] = []
    left: set[Sequence] = set()
    while waiting or batch.sequences:
        while waiting and (not batch.sequences or rng.random() < 0.3):
            rows.append(waiting.pop(0).join(batch, decoder))
        if rng.random() < 0.05:
            early = rng.choice(batch.sequences)
            early.status = Status.FINISHED
            left.add(early)
        batch.advance()
    for each, row in zip(sequences, rows, strict=True):
        want = [r.tokens for r in each.alone(decoder).results]
        got = [r.tokens for r in each.results]
        assert got == (want[: len(got)] if row in left else want)
