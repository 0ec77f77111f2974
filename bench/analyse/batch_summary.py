"""Summaries of batches: tokens per second of each request and in total (the paper's Table 3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from redrafter_mlx.bench.analyse.result import Protocol
from redrafter_mlx.bench.measure.batches import BatchMeasurement, BatchRun
from redrafter_mlx.bench.measure.machine import LoadedModel, Machine
from redrafter_mlx.bench.measure.methods import BASELINE, Method
from redrafter_mlx.bench.statistics import Ragged, Spread, ratio, ratio_of_ratios


@dataclass(frozen=True)
class BatchRow:
    """Figures of one method with batches of `size` requests.

    request_tps:     tokens per second of one request
    total_tps:       tokens per second of all requests together
    speedup:         total_tps over that of mlx-lm's own batch of that size
    over_plain:      total_tps over that of our own batch of that size without drafts
    tokens_per_step: of one request, the mean
    first_seconds:   seconds until every request has its first token, the median
    peak_memory:     GB
    matches_plain:   whether all tokens equal those of mlx-lm's loop for one prompt; None if sampled
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

    def to_dict(self) -> dict[str, object]:
        """Return the object that `-o json` prints."""
        shown = asdict(self)
        method = shown.pop("method")
        shape = {key: method[key] for key in ("temperature", "accept", "beam_width", "beam_length")}
        return {"batch_size": shown.pop("size"), "method": method["name"],
                "drafter": method["drafter"], **shape, **shown}  # fmt: skip


@dataclass(frozen=True)
class BatchResult:
    """The whole result of one `bench --batch-size`."""

    machine: Machine
    models: tuple[LoadedModel, ...]
    protocol: Protocol
    rows: tuple[BatchRow, ...]

    @property
    def failed(self) -> bool:
        """Whether our tokens differ from mlx-lm's although float32 guarantees equality."""
        differ = any(row.matches_plain is False for row in self.rows if row.method.ours)
        return differ and all(model.exact for model in self.models)

    def to_dict(self) -> dict[str, object]:
        """Return the object that `-o json` prints."""
        return {
            "machine": asdict(self.machine),
            "models": [asdict(model) for model in self.models],
            "protocol": asdict(self.protocol),
            "baseline": "mlx-lm BatchGenerator",
            "rows": [row.to_dict() for row in self.rows],
        }


def summarise_batches(
    measured: Sequence[BatchMeasurement], plain: Mapping[int | str, Sequence[int]]
) -> list[BatchRow]:
    """Return a row per batch size and method, by size, then temperature, baselines first.

    Args:
      plain: the tokens of mlx-lm's loop for one prompt, by question id
    """
    cases: dict[tuple[int, Method], list[BatchMeasurement]] = {}
    for measurement in measured:
        cases.setdefault((measurement.size, measurement.method), []).append(measurement)
    order = {method: i for i, method in enumerate(sorted({m for _, m in cases}, key=_place))}
    rows = []
    for size, method in sorted(cases, key=lambda case: (case[0], order[case[1]])):
        mine = cases[size, method]
        mlx_lm = cases.get((size, Method(BASELINE, method.temperature)))
        ours = cases.get((size, Method("autoregressive", method.temperature)))
        answers = [m.run for m in mine]
        exact = all(
            ids == plain[question.question.id or 0]
            for m in mine
            for question, ids in zip(m.questions, m.run.token_ids, strict=True)
        )
        rows.append(
            BatchRow(
                size=size,
                method=method,
                request_tps=ratio(_tokens(mine), _seconds(mine, sum)),
                total_tps=ratio(_tokens(mine), _seconds(mine, max)),
                speedup=_over(mine, mlx_lm),
                over_plain=_over(mine, ours),
                tokens_per_step=_tokens_per_step(answers),
                first_seconds=float(np.median([run.first_seconds for run in answers])),
                peak_memory=max(run.peak_memory for run in answers),
                matches_plain=exact if method.temperature == 0 else None,
            )
        )
    return rows


def _place(method: Method) -> tuple[float, int, str, int, int]:
    """Sort key: temperature; baselines first; then drafter, automatic shape, width and length."""
    kind = ("mlx-lm", "autoregressive").index(method.name) if method.name != "redrafter" else 2
    width, length = method.beam_width or 0, method.beam_length or 0
    return method.temperature, kind, method.drafter or "", width, length


def _tokens(measured: Sequence[BatchMeasurement]) -> Ragged:
    """Return the number of tokens per group of questions and repeat."""
    return _by_group(measured, lambda run: float(sum(run.tokens)))


def _seconds(
    measured: Sequence[BatchMeasurement], together: Callable[[Sequence[float]], float]
) -> Ragged:
    """Return the seconds per group and repeat: `sum` over its requests, or `max` of the batch."""
    return _by_group(measured, lambda run: together(run.seconds))


def _by_group(measured: Sequence[BatchMeasurement], value: Callable[[BatchRun], float]) -> Ragged:
    groups: dict[tuple[object, ...], list[float]] = {}
    for m in measured:
        asked = tuple(question.question.id for question in m.questions)
        groups.setdefault(asked, []).append(value(m.run))
    return list(groups.values())


def _over(
    mine: Sequence[BatchMeasurement], other: Sequence[BatchMeasurement] | None
) -> Spread | None:
    """Return total tokens per second over another method's, for the same questions and repeats."""
    if other is None:
        return None
    return ratio_of_ratios(
        (_tokens(mine), _seconds(mine, max)), (_tokens(other), _seconds(other, max))
    )


def _tokens_per_step(runs: Sequence[BatchRun]) -> float:
    tokens = sum(len(ids) - 1 for run in runs for ids in run.token_ids)
    return tokens / max(sum(sum(run.steps) for run in runs), 1)
