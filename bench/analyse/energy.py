"""Joules a token, from a meter's readings over the time in which each answer was decoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from redrafter_mlx.bench.measure.answers import Answer
from redrafter_mlx.bench.measure.methods import Method


@dataclass(frozen=True)
class Energy:
    """Of one method: joules for each token after the first, the mean power, and of how many."""

    dtype: str
    method: Method
    joules_per_token: float
    watts: float
    answers: int

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def energy_of(
    answers: Sequence[Answer], joules: Callable[[float, float], float | None]
) -> tuple[Energy, ...]:
    """For each method in the order of its first answer.

    joules: between two moments, seconds since 1970; None where that is not known, as of answers
            that an earlier run gave
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
