"""Summaries of answers: a row per method and category, compared with its baseline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from redrafter_mlx.bench.measure.answers import Answer
from redrafter_mlx.bench.measure.methods import BASELINE, Method, Run
from redrafter_mlx.bench.measure.questions import WHOLE
from redrafter_mlx.bench.statistics import (
    Percentiles,
    Ragged,
    Spread,
    ratio,
    ratio_of_ratios,
    typical,
)
from redrafter_mlx.decoding.prefix_cache import common_prefix

Runs = Mapping[tuple[int | str, int], Run]
"""Runs by question id and repeat."""


@dataclass(frozen=True)
class Row:
    """One method on one category of questions.

    tps:              tokens per second after the first token
    speedup:          tps over the baseline's, for the questions and repeats that both have
    first_token:      seconds
    nodes:            N, the mean number of nodes verified in a step, without padding; counted in
                      the trees, None for mlx-lm's loops
    query_rows:       the same with padding, which the target's call also computes
    shapes:           [W, L, share of the steps], most frequent first; only one unless automatic
    nodes_before:     W * L, the size of the beams before shared prefixes are merged
    nodes_after:      nodes verified, without padding
    acceptance:       share of steps in which the first draft was accepted, the second, ...
    peak_memory:      GB, maximum over the runs; includes the weights
    matches_baseline: whether all tokens of all runs equal the baseline's; None above temperature 0
    agreeing:         share of tokens before the first difference; None above temperature 0
    """

    dtype: str
    method: Method
    category: str
    questions: int
    runs: int
    tps: Spread | None
    speedup: Spread | None
    tokens_per_step: Spread | None
    first_token: Spread | None
    nodes: float | None
    query_rows: float | None
    shapes: tuple[tuple[int, int, float], ...]
    nodes_before: Percentiles | None
    nodes_after: Percentiles | None
    acceptance: tuple[float, ...]
    peak_memory: float
    matches_baseline: bool | None
    agreeing: float | None

    def to_dict(self) -> dict[str, object]:
        """Return the row as JSON: with the method's fields, and the method's name as `method`."""
        method = asdict(self.method)
        name = method.pop("name")
        return {**asdict(self), **method, "method": name}


def summarise(answers: Sequence[Answer]) -> list[Row]:
    """Return a row per dtype, category and method; dtypes and categories as they first occur.

    Rows by category are added only if there are several categories.
    """
    rows = []
    for dtype in dict.fromkeys(a.dtype for a in answers):
        mine = [a for a in answers if a.dtype == dtype]
        named = list(dict.fromkeys(a.category for a in mine if a.category))
        for category in [WHOLE, *(named if len(named) > 1 else [])]:
            by_method: dict[Method, dict[tuple[int | str, int], Run]] = {}
            for a in mine:
                if category in (WHOLE, a.category):
                    by_method.setdefault(a.method, {})[a.question_id, a.repeat] = a.run
            rows += [
                _row(dtype, category, m, by_method[m], by_method.get(m.baseline(), {}))
                for m in sorted(by_method, key=lambda method: method.order)
            ]
    return rows


def of_whole_rounds(answers: Sequence[Answer]) -> list[Answer]:
    """Return the answers to questions that all methods have answered; all if there are none.

    Otherwise the speed of two methods would be compared over different questions.
    """
    methods: dict[str, set[Method]] = {}
    rounds: dict[tuple[str, int | str, int], set[Method]] = {}
    for a in answers:
        methods.setdefault(a.dtype, set()).add(a.method)
        rounds.setdefault((a.dtype, a.question_id, a.repeat), set()).add(a.method)
    whole = {key for key, answered in rounds.items() if answered == methods[key[0]]}
    kept = [a for a in answers if (a.dtype, a.question_id, a.repeat) in whole]
    return kept or list(answers)


def _row(dtype: str, category: str, method: Method, runs: Runs, baseline: Runs) -> Row:
    ours = method.name == "redrafter"
    accepted = [n for run in runs.values() for n in run.accepted]
    drafted = ours or method.draft_tokens is not None
    depths = range(1, 1 + max(accepted, default=0)) if drafted else ()
    nodes = [n for run in runs.values() for n in run.nodes]
    query_rows = [n for run in runs.values() for n in run.query_rows]
    shapes = Counter((W, L) for run in runs.values() for W, L, *_ in run.shapes if ours)
    steps = _by_question(runs, lambda run: len(run.accept_lengths))
    matches, agreeing = _equality(method, runs, baseline)
    return Row(
        dtype=dtype,
        method=method,
        category=category,
        questions=len({question for question, _ in runs}),
        runs=len(runs),
        tps=ratio(*_tokens_and_seconds(runs, runs)),
        speedup=ratio_of_ratios(
            _tokens_and_seconds(runs, baseline), _tokens_and_seconds(baseline, runs)
        ),
        tokens_per_step=ratio(_by_question(runs, _tokens), steps),
        first_token=typical(_by_question(runs, lambda run: run.first_token_seconds)),
        nodes=fmean(nodes) if nodes else None,
        query_rows=fmean(query_rows) if query_rows else None,
        shapes=tuple((W, L, n / shapes.total()) for (W, L), n in shapes.most_common()),
        nodes_before=Percentiles.of([W * L for W, L in shapes.elements()]),
        nodes_after=Percentiles.of(nodes) if ours else None,
        acceptance=tuple(sum(n >= d for n in accepted) / len(accepted) for d in depths),
        peak_memory=max(run.peak_memory for run in runs.values()),
        matches_baseline=matches,
        agreeing=agreeing,
    )


def _by_question(runs: Runs, value: Callable[[Run], float]) -> Ragged:
    """Return a value of each run by question, repeats in order."""
    grouped: dict[int | str, list[float]] = {}
    for question, repeat in sorted(runs, key=lambda key: (str(key[0]), key[1])):
        grouped.setdefault(question, []).append(value(runs[question, repeat]))
    return list(grouped.values())


def _tokens_and_seconds(runs: Runs, partner: Runs) -> tuple[Ragged, Ragged]:
    """Return the tokens after the first and their seconds, for runs that `partner` has too."""
    both = {key: run for key, run in runs.items() if key in partner}
    return _by_question(both, _tokens), _by_question(both, lambda run: run.decode_seconds)


def _tokens(run: Run) -> int:
    return sum(run.accept_lengths)


def _equality(method: Method, runs: Runs, baseline: Runs) -> tuple[bool | None, float | None]:
    """Return whether all paired runs have the baseline's tokens, and the share that agrees.

    The baseline's own later repeats are compared with its first.
    """
    if method.temperature > 0:
        return None, None
    paired = [
        (run.token_ids, other.token_ids)
        for (question, repeat), run in runs.items()
        if (other := baseline.get((question, 0 if method.name == BASELINE else repeat)))
    ]
    total = sum(max(len(mine), len(other)) for mine, other in paired)
    if not total:
        return None, None
    agreeing = sum(common_prefix(mine, other) for mine, other in paired)
    return agreeing == total, agreeing / total
