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
    measured: dict[tuple[str, Method], list[tuple[float, float, int]]] = {}
    for answer in answers:
        seconds, tokens = answer.run.decode_seconds, len(answer.run.token_ids) - 1
        energy = joules(answer.tstamp - seconds, answer.tstamp)
        if energy is not None and tokens > 0:
            each = measured.setdefault((answer.dtype, answer.method), [])
            each.append((energy, seconds, tokens))
    found = []
    for (dtype, method), each in measured.items():
        energy, seconds, tokens = map(sum, zip(*each, strict=True))
        found.append(Energy(dtype, method, energy / tokens, energy / seconds, len(each)))
    return tuple(found)
