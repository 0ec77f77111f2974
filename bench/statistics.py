"""Figures with their spread, from runs that are paired by question and repeat.

A figure is a ratio of totals, such as tokens over seconds. Each question contributes the median of
its repeats, so one disturbed repeat changes nothing; longer answers weigh more. The spread is a 95%
bootstrap interval: questions are resampled with replacement, and so are the repeats of each. A
ratio of two methods uses the same draws for both, so a slowdown that both share does not widen the
interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

Ragged = Sequence[Sequence[float]]
"""One value per question and repeat; every question has at least one repeat."""

_DRAWS = 1000


@dataclass(frozen=True)
class Spread:
    """A figure and its 95% interval; `low` and `high` equal `median` if there is only one run."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Percentiles:
    """Percentiles of a count, as in the paper's Figure 6."""

    p1: float
    median: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[int]) -> Percentiles | None:
        return cls(*map(float, np.percentile(values, (1, 50, 99)))) if values else None


def ratio(over: Ragged, under: Ragged) -> Spread | None:
    """Return the total of `over` divided by the total of `under`; None if `under` totals 0."""
    return _spread(_quotients(over, under))


def ratio_of_ratios(a: tuple[Ragged, Ragged], b: tuple[Ragged, Ragged]) -> Spread | None:
    """Return `ratio` of a divided by `ratio` of b; both have the same questions and repeats."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return _spread(_quotients(*a) / _quotients(*b))


def typical(values: Ragged) -> Spread | None:
    """Return the median over questions of the median over repeats."""
    return _spread(np.median(_medians(values), axis=1))


def _spread(figures: Floats) -> Spread | None:
    """Return the first figure with the interval of the others; None if it is not finite."""
    centre, drawn = figures[0], figures[1:][np.isfinite(figures[1:])]
    if not np.isfinite(centre) or drawn.size == 0:
        return None
    return Spread(float(centre), *map(float, np.percentile(drawn, (2.5, 97.5))))


def _quotients(over: Ragged, under: Ragged) -> Floats:
    """Return the quotients of totals [1 + X], NaN where `under` totals 0; see `_medians`."""
    above, below = _medians(over).sum(axis=1), _medians(under).sum(axis=1)
    return np.divide(above, below, out=np.full_like(above, np.nan), where=below > 0)


def _medians(values: Ragged) -> Floats:
    """Return the median of each question's repeats [1 + X, Q]: first of all, then as drawn X times.

    Questions are drawn, and repeats of each; equal counts of repeats always give equal draws.
    """
    if not values:
        return np.full((1 + _DRAWS, 1), np.nan)
    counts = np.array([len(repeats) for repeats in values])
    table = np.full((len(counts), counts.max()), np.nan)  # [Q, R], NaN after the last repeat
    for row, repeats in zip(table, values, strict=True):
        row[: len(repeats)] = repeats
    rng = np.random.default_rng(0)
    questions = rng.integers(0, len(counts), (_DRAWS, len(counts)))  # [X, Q]
    luck = rng.random((*questions.shape, table.shape[1]))
    chosen = (luck * counts[questions][:, :, None]).astype(np.int64)  # [X, Q, R]
    drawn = np.median(table[questions[:, :, None], chosen], axis=2)
    return np.vstack([np.nanmedian(table, axis=1), drawn])
