"""Joules per token, from a power meter's readings while each answer was decoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from redrafter_mlx.bench.measure.answers import Answer
from redrafter_mlx.bench.measure.methods import Method


@dataclass(frozen=True)
class Energy:
    """Energy of one method.

    joules_per_token: over the tokens after each answer's first
    watts:            mean power
    answers:          number of answers measured
    """

    dtype: str
    method: Method
    joules_per_token: float
    watts: float
    answers: int


def energy_of(
    answers: Sequence[Answer], joules: Callable[[float, float], float | None]
) -> tuple[Energy, ...]:
    """Return the energy of each method, in the order of its first answer.

    joules: energy between two moments, in seconds since 1970; None if it is unknown, as it is for
            answers of an earlier run
    """
    sums: dict[tuple[str, Method], tuple[float, float, int, int]] = {}
    for answer in answers:
        seconds, tokens = answer.run.decode_seconds, len(answer.run.token_ids) - 1
        energy = joules(answer.tstamp - seconds, answer.tstamp)
        if energy is None or tokens < 1:
            continue
        before = sums.get((answer.dtype, answer.method), (0.0, 0.0, 0, 0))
        more = (energy, seconds, tokens, 1)
        e, s, t, n = (a + b for a, b in zip(before, more, strict=True))
        sums[answer.dtype, answer.method] = e, s, int(t), int(n)
    return tuple(
        Energy(dtype, method, energy / tokens, energy / seconds, count)
        for (dtype, method), (energy, seconds, tokens, count) in sums.items()
    )
