"""Summaries of batches: tokens per second of each request and in total (the paper's Table 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from redrafter_mlx.bench.measure.batches import BatchMeasurement, BatchRun, ids_of
from redrafter_mlx.bench.measure.methods import Method
from redrafter_mlx.bench.statistics import Ragged, Spread, ratio, ratio_of_ratios


@dataclass(frozen=True)
class BatchRow:
    """Figures of one method with batches of `size` requests.

    request_tps:     tokens per second of one request, until it ends
    total_tps:       the same times `size`: of as many requests whenever one that ends is replaced
    speedup:         total_tps over that of mlx-lm's own batch of that size
    over_plain:      total_tps over that of our own batch of that size without drafts
    tokens_per_step: of one request, the mean
    first_seconds:   seconds until every request has its first token, the median
    peak_memory:     GB
    matches_plain:   whether all tokens equal those of mlx-lm's loop for one prompt; None if sampled
    out_of_memory:   whether one of its batches did not fit
    """

    size: int
    method: Method
    request_tps: Spread | None
    total_tps: Spread | None
    speedup: Spread | None
    over_plain: Spread | None
    tokens_per_step: float
    first_seconds: float
    peak_memory: float
    matches_plain: bool | None
    out_of_memory: bool = False

    def to_dict(self) -> dict[str, object]:
        """Return the object that `--json` prints: with the method's fields, and its name."""
        shown = asdict(self)
        method = shown.pop("method")
        return {"batch_size": shown.pop("size"), "method": method.pop("name"), **method, **shown}


def summarise_batches(measured: Sequence[BatchMeasurement]) -> list[BatchRow]:
    """Return a row per batch size and method, by size, then temperature, baselines first."""
    cases: dict[tuple[int, Method], list[BatchMeasurement]] = {}
    for measurement in measured:
        cases.setdefault((len(measurement.questions), measurement.method), []).append(measurement)

    def figures(size: int, method: Method) -> tuple[Ragged, Ragged]:
        return _tokens_and_seconds(cases.get((size, method), []))

    rows = []
    for size, method in sorted(cases, key=lambda case: (case[0], case[1].order)):
        mine, plain = cases[size, method], Method("autoregressive", method.temperature)
        runs, own = [m.run for m in mine], figures(size, method)
        tokens = sum(len(ids) - 1 for run in runs for ids in run.token_ids)
        steps = sum(n for run in runs for n in run.steps)
        matches = [run.matches_plain for run in runs]
        rows.append(
            BatchRow(
                size=size,
                method=method,
                request_tps=ratio(*own),
                total_tps=ratio([[size * n for n in group] for group in own[0]], own[1]),
                speedup=ratio_of_ratios(own, figures(size, method.baseline())),
                over_plain=ratio_of_ratios(own, figures(size, plain)),
                tokens_per_step=tokens / max(steps, 1),
                first_seconds=float(np.median([run.first_seconds for run in runs])),
                peak_memory=max(run.peak_memory for run in runs),
                matches_plain=None if None in matches else all(matches),
                out_of_memory=any(run.out_of_memory for run in runs),
            )
        )
    return rows


def _tokens_and_seconds(measured: Sequence[BatchMeasurement]) -> tuple[Ragged, Ragged]:
    """Return tokens and seconds per group of questions and repeat, groups in one order for all.

    Both are sums over the requests of a batch.
    """
    groups: dict[tuple[str, ...], list[BatchRun]] = {}
    for m in measured:
        groups.setdefault(tuple(map(str, ids_of(m.questions))), []).append(m.run)
    runs = [groups[asked] for asked in sorted(groups)]
    tokens = [[float(sum(run.tokens)) for run in group] for group in runs]
    return tokens, [[sum(run.seconds) for run in group] for group in runs]
