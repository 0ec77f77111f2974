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
Whole = npt.NDArray[np.int64]

_DRAWS = 1000
_PERCENT = (2.5, 97.5)


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
        if not values:
            return None
        p1, median, p99 = np.percentile(values, (1, 50, 99))
        return cls(float(p1), float(median), float(p99))


Ragged = Sequence[Sequence[float]]
"""One value per question and repeat; every question has at least one repeat."""


def ratio(over: Ragged, under: Ragged) -> Spread | None:
    """Return the total of `over` divided by the total of `under`; None if `under` totals 0."""
    return _spread([(over, under)])


def ratio_of_ratios(a: tuple[Ragged, Ragged], b: tuple[Ragged, Ragged]) -> Spread | None:
    """Return `ratio` of a divided by `ratio` of b; both have the same questions and repeats."""
    return _spread([a, b])


def typical(values: Ragged) -> Spread | None:
    """Return the median over questions of the median over repeats."""
    if not values:
        return None
    table, counts = _table(values)
    centre = float(np.median(np.nanmedian(table, axis=1)))
    questions, repeats = _draws(counts, table.shape[1])
    drawn = np.median(_medians(table, questions, repeats), axis=1)
    low, high = np.percentile(drawn, _PERCENT)
    return Spread(centre, float(low), float(high))


def _spread(ratios: Sequence[tuple[Ragged, Ragged]]) -> Spread | None:
    if not ratios[0][0]:
        return None
    counts = _table(ratios[0][0])[1]
    centre, drawn = 1.0, np.ones(_DRAWS)
    for i, (over, under) in enumerate(ratios):
        above, below = _table(over)[0], _table(under)[0]
        questions, repeats = _draws(counts, above.shape[1])
        total = np.nanmedian(below, axis=1).sum()
        value = np.nanmedian(above, axis=1).sum() / total if total > 0 else np.nan
        sums = _medians(below, questions, repeats).sum(axis=1)
        values = np.full(_DRAWS, np.nan)
        np.divide(_medians(above, questions, repeats).sum(axis=1), sums, out=values, where=sums > 0)
        centre = centre * value if i == 0 else centre / value
        drawn = drawn * values if i == 0 else drawn / values
    drawn = drawn[np.isfinite(drawn)]
    if not np.isfinite(centre) or drawn.size == 0:
        return None
    low, high = np.percentile(drawn, _PERCENT)
    return Spread(float(centre), float(low), float(high))


def _table(values: Ragged) -> tuple[Floats, Whole]:
    """Return the values [Q, R], NaN after a question's last repeat, and the repeat counts [Q]."""
    counts = np.array([len(repeats) for repeats in values], np.int64)
    table = np.full((len(values), int(counts.max())), np.nan)
    for row, repeats in zip(table, values, strict=True):
        row[: len(repeats)] = repeats
    return table, counts


def _draws(counts: Whole, width: int) -> tuple[Whole, Whole]:
    """Draw questions [X, Q] and repeats [X, Q, R]; equal counts always give equal draws."""
    rng = np.random.default_rng(0)
    questions = rng.integers(0, len(counts), (_DRAWS, len(counts)))
    luck = rng.random((_DRAWS, len(counts), width))
    return questions, (luck * counts[questions][:, :, None]).astype(np.int64)


def _medians(table: Floats, questions: Whole, repeats: Whole) -> Floats:
    """Return the median over the drawn repeats of each drawn question, [X, Q]."""
    drawn: Floats = np.median(table[questions[:, :, None], repeats], axis=2)
    return drawn
