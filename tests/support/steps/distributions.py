"""The distribution that tokens are drawn from, in NumPy: a slow, plain reference."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from redrafter_mlx.config import SamplingParams


def sampled_probs(
    logits: mx.array | NDArray[np.floating], params: SamplingParams
) -> NDArray[np.float64]:
    """Return the probability [..., V] of each token, for logits [..., V].

    mlx-lm filters in the order top_p, min_p, top_k, by the probabilities at temperature 1; the
    temperature only reshapes what remains.
    """
    rows = np.array(logits, np.float64)
    flat = [_probs_of_row(row, params) for row in rows.reshape(-1, rows.shape[-1])]
    return np.array(flat).reshape(rows.shape)


def _probs_of_row(logits: NDArray[np.float64], params: SamplingParams) -> NDArray[np.float64]:
    order = np.argsort(-logits, kind="stable")
    ranked = _softmax(logits[order])  # the most probable first
    kept = np.ones(len(ranked), bool)
    if params.top_p < 1:
        kept &= np.cumsum(ranked) - ranked < params.top_p
    if params.min_p:
        kept &= ranked >= params.min_p * ranked[0]
    if params.top_k:
        kept &= np.arange(len(ranked)) < params.top_k
    probs = np.zeros(len(logits))
    probs[order[kept]] = _softmax(logits[order[kept]] / params.temperature)
    return probs


def _softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def chi_square(counts: np.ndarray, expected: np.ndarray) -> tuple[float, int]:
    """Return Pearson's statistic and its degrees of freedom; cells that expect < 8 are merged."""
    assert counts[expected == 0].sum() == 0, "drew what has no probability"
    rare = expected < 8
    got = np.append(counts[~rare], counts[rare].sum())
    want = np.append(expected[~rare], expected[rare].sum())
    used = want > 0
    statistic = ((got[used] - want[used]) ** 2 / want[used]).sum()
    return float(statistic), int(used.sum()) - 1


def critical(freedom: int) -> float:
    """Return the 1 - 1e-6 quantile of chi-square (Wilson and Hilferty's approximation)."""
    z = 4.753
    h = 2 / (9 * freedom)
    return freedom * (1 - h + z * math.sqrt(h)) ** 3
