"""Summaries of batches: tokens per second of each request and in total (the paper's Table 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from redrafter_mlx.bench.analyse.result import Protocol
from redrafter_mlx.bench.measure.batches import BatchMeasurement, BatchRun
from redrafter_mlx.bench.measure.machine import LoadedModel, Machine
from redrafter_mlx.bench.measure.methods import BASELINE, Method
from redrafter_mlx.bench.statistics import Ragged, Spread, ratio, ratio_of_ratios

_OTHER_TOKENS = (
    "our tokens are not those of mlx-lm in float32, where they must be; please report it"
)


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
        """Return the object that `-o json` prints: with the method's fields, and its name."""
        shown = asdict(self)
        method = shown.pop("method")
        return {"batch_size": shown.pop("size"), "method": method.pop("name"), **method, **shown}


@dataclass(frozen=True)
class BatchResult:
    """The whole result of one `bench --batch-size`.

    remarks:     lines that must be shown with the figures
    interrupted: Ctrl-C came before everything was measured
    """

    machine: Machine
    models: tuple[LoadedModel, ...]
    protocol: Protocol
    rows: tuple[BatchRow, ...]
    remarks: tuple[str, ...] = ()
    interrupted: bool = False

    @property
    def failed(self) -> bool:
        """Whether our tokens differ from mlx-lm's although float32 guarantees equality."""
        differ = any(row.matches_plain is False for row in self.rows if row.method.ours)
        return differ and all(model.exact for model in self.models)

    @property
    def notes(self) -> tuple[str, ...]:
        """The remarks, and the reason if it failed."""
        return (*self.remarks, *([_OTHER_TOKENS] if self.failed else []))

    def to_dict(self) -> dict[str, object]:
        """Return the object that `-o json` prints."""
        return {
            "machine": asdict(self.machine),
            "models": [asdict(model) for model in self.models],
            "protocol": asdict(self.protocol),
            "baseline": "mlx-lm BatchGenerator",
            "interrupted": self.interrupted,
            "notes": list(self.notes),
            "rows": [row.to_dict() for row in self.rows],
        }


def summarise_batches(measured: Sequence[BatchMeasurement]) -> list[BatchRow]:
    """Return a row per batch size and method, by size, then temperature, baselines first."""
    cases: dict[tuple[int, Method], list[BatchMeasurement]] = {}
    for measurement in measured:
        cases.setdefault((measurement.size, measurement.method), []).append(measurement)
    order = {
        method: i for i, method in enumerate(sorted(dict.fromkeys(m for _, m in cases), key=_place))
    }
    rows = []
    for size, method in sorted(cases, key=lambda case: (case[0], order[case[1]])):
        mine = cases[size, method]
        mlx_lm = cases.get((size, Method(BASELINE, method.temperature)))
        ours = cases.get((size, Method("autoregressive", method.temperature)))
        answers = [m.run for m in mine]
        matches = [run.matches_plain for run in answers]
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
                matches_plain=None if None in matches else all(matches),
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
    """Return a value per group and repeat; all methods have the groups in the same order."""
    groups: dict[tuple[str, ...], list[float]] = {}
    for m in measured:
        asked = tuple(str(question.question.id) for question in m.questions)
        groups.setdefault(asked, []).append(value(m.run))
    return [groups[asked] for asked in sorted(groups)]


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
