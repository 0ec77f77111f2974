"""Summaries of answers: a row per method and category, compared with its baseline.

A batch counts as one run, whose tokens and seconds are sums over its requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from redrafter_mlx.bench.measure.answers import Answer
from redrafter_mlx.bench.measure.methods import BASELINE, Method
from redrafter_mlx.bench.measure.questions import WHOLE
from redrafter_mlx.bench.measure.runner import Run
from redrafter_mlx.bench.statistics import (
    Percentiles,
    Ragged,
    Spread,
    ratio,
    ratio_of_ratios,
    typical,
)
from redrafter_mlx.decoding.cache.prefix_cache import common_prefix

Group = tuple[int | str, ...]
"""Ids of questions that were answered at once."""

Runs = Mapping[tuple[Group, int], Sequence[Answer]]
"""The answers of each run, by its questions and repeat."""

_IN_BATCHES = {
    "request_tps": "tps", "total_tps": "total_tps", "speedup": "speedup",
    "over_plain": "over_plain", "tokens_per_step": "tokens_per_step",
    "first_seconds": "first_token", "peak_memory": "peak_memory",
    "matches_plain": "matches_baseline", "out_of_memory": "out_of_memory",
}  # fmt: skip
"""Fields of a row of batches by their names in JSON; the others are of single requests."""

_NOT_OF_ONE = ("prompt_tokens", "total_tps", "over_plain", "out_of_memory")
"""Fields that rows of single requests do not have in JSON."""


@dataclass(frozen=True)
class Row:
    """One method on one category of questions.

    prompt_tokens:    length that every prompt was brought to; None if they were left unchanged
    tps:              tokens per second of one request after its first token; in a batch, after
                      every request has its first one
    total_tps:        tps times the batch size: of as many requests whenever one that ends is
                      replaced
    speedup:          tps over the baseline's, for the questions and repeats that both have
    over_plain:       tps over that of our own loop without drafts, likewise
    first_token:      seconds until every request of the batch has its first token
    nodes:            N, the mean number of nodes verified in a step, without padding; counted in
                      the trees, None for mlx-lm's loops
    query_rows:       the same with padding, which the target's call also computes
    shapes:           [W, L, share of the steps], most frequent first; only one unless automatic
    nodes_before:     W * L, the size of the beams before shared prefixes are merged
    nodes_after:      nodes verified, without padding
    acceptance:       share of steps in which the first draft was accepted, the second, ...
    peak_memory:      GB, maximum over the runs; includes the weights
    matches_baseline: whether all tokens of all runs equal those of mlx-lm's loop for one prompt;
                      None above temperature 0
    agreeing:         share of tokens before the first difference; None above temperature 0, and in
                      batches
    out_of_memory:    whether one of its batches did not fit
    """

    dtype: str
    prompt_tokens: int | None
    method: Method
    category: str
    questions: int
    runs: int
    tps: Spread | None
    total_tps: Spread | None
    speedup: Spread | None
    over_plain: Spread | None
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
    out_of_memory: bool

    def to_dict(self) -> dict[str, object]:
        """Return the row as JSON, with its method's fields; of batches under `_IN_BATCHES`."""
        figures, method = asdict(self), asdict(self.method)
        method["method"] = method.pop("name")
        if (size := method.pop("batch_size")) is None:
            return {k: v for k, v in figures.items() if k not in _NOT_OF_ONE} | method
        shown = {name: figures[field] for name, field in _IN_BATCHES.items()}
        for name in ("tokens_per_step", "first_seconds"):
            shown[name] = shown[name] and shown[name]["median"]
        return {"batch_size": size, **method, **shown}


def summarise(answers: Sequence[Answer]) -> list[Row]:
    """Return a row per dtype, length of prompts, category and method, as they first occur.

    Rows by category are added only if there are several categories, and not of batches, which mix
    them.
    """
    rows = []
    for dtype, length in dict.fromkeys((a.dtype, a.prompt_tokens) for a in answers):
        mine = [a for a in answers if (a.dtype, a.prompt_tokens) == (dtype, length)]
        named = [a.category for a in mine if a.category and a.method.batch_size is None]
        categories = [*dict.fromkeys(named)]
        for category in [WHOLE, *(categories if len(categories) > 1 else [])]:
            by_method: dict[Method, dict[tuple[Group, int], list[Answer]]] = {}
            for a in mine:
                if category == WHOLE or (a.method.batch_size is None and a.category == category):
                    runs = by_method.setdefault(a.method, {})
                    runs.setdefault((a.group, a.repeat), []).append(a)
            rows += [
                _row(dtype, length, category, method, by_method)
                for method in sorted(by_method, key=lambda method: method.order)
            ]
    return rows


def of_whole_rounds(
    answers: Sequence[Answer], planned: Mapping[str, Sequence[Method]]
) -> list[Answer]:
    """Return the answers to questions that all methods of their batch size have answered.

    Otherwise the speed of two methods would be compared over different questions. `planned` are the
    methods of each dtype.
    """
    answered: dict[tuple[object, ...], set[Method]] = {}
    for a in answers:
        answered.setdefault(a.round, set()).add(a.method)
    return [
        a for a in answers
        if answered[a.round].issuperset(
            m for m in planned[a.dtype] if m.batch_size == a.method.batch_size
        )
    ]  # fmt: skip


def _row(
    dtype: str,
    prompt_tokens: int | None,
    category: str,
    method: Method,
    by_method: Mapping[Method, Runs],
) -> Row:
    runs, size = by_method[method], method.batch_size or 1
    answers = [answer for run in runs.values() for answer in run]
    ours = method.name == "redrafter"
    accepted = [n for a in answers for n in a.run.accepted]
    drafted = ours or method.draft_tokens is not None
    depths = range(1, 1 + max(accepted, default=0)) if drafted else ()
    nodes = [n for a in answers for n in a.run.nodes]
    query_rows = [n for a in answers for n in a.run.query_rows]
    shapes = Counter((W, L) for a in answers for W, L, *_ in a.run.shapes if ours)
    emitted = _by_question(runs, lambda run: sum(run.accept_lengths))
    steps = _by_question(runs, lambda run: len(run.accept_lengths))
    tokens, seconds = _tokens_and_seconds(runs, runs)
    matches, agreeing = _equality(method, runs, by_method.get(method.baseline(), {}))
    return Row(
        dtype=dtype,
        prompt_tokens=prompt_tokens,
        method=method,
        category=category,
        questions=len({answer.question_id for answer in answers}),
        runs=len(answers),
        tps=ratio(tokens, seconds),
        total_tps=ratio([[size * n for n in repeats] for repeats in tokens], seconds),
        speedup=_over(runs, by_method.get(method.baseline(), {})),
        over_plain=_over(runs, by_method.get(method.without_drafts(), {})),
        tokens_per_step=ratio(emitted, steps),
        first_token=typical(_by_question(runs, lambda run: run.first_token_seconds / size)),
        nodes=fmean(nodes) if nodes else None,
        query_rows=fmean(query_rows) if query_rows else None,
        shapes=tuple((W, L, n / shapes.total()) for (W, L), n in shapes.most_common()),
        nodes_before=Percentiles.of([W * L for W, L in shapes.elements()]),
        nodes_after=Percentiles.of(nodes) if ours else None,
        acceptance=tuple(sum(n >= d for n in accepted) / len(accepted) for d in depths),
        peak_memory=max(answer.run.peak_memory for answer in answers),
        matches_baseline=matches,
        agreeing=agreeing,
        out_of_memory=any(answer.run.out_of_memory for answer in answers),
    )


def _by_question(runs: Runs, value: Callable[[Run], float]) -> Ragged:
    """Return a value of each run, summed over its requests, by questions, repeats in order."""
    grouped: dict[Group, list[float]] = {}
    for group, repeat in sorted(runs, key=lambda key: (*map(str, key[0]), key[1])):
        total = sum(value(answer.run) for answer in runs[group, repeat])
        grouped.setdefault(group, []).append(total)
    return list(grouped.values())


def _over(runs: Runs, other: Runs) -> Spread | None:
    """Return tokens a second over those of another method, for the runs that both have."""
    return ratio_of_ratios(_tokens_and_seconds(runs, other), _tokens_and_seconds(other, runs))


def _tokens_and_seconds(runs: Runs, partner: Runs) -> tuple[Ragged, Ragged]:
    """Return the timed tokens and their seconds, for runs that `partner` has too."""
    both = {key: run for key, run in runs.items() if key in partner}
    tokens = _by_question(both, lambda run: run.timed_tokens)
    return tokens, _by_question(both, lambda run: run.decode_seconds)


def _equality(method: Method, runs: Runs, baseline: Runs) -> tuple[bool | None, float | None]:
    """Return whether all paired runs have the baseline's tokens, and the share that agrees.

    The baseline's own later repeats are compared with its first, and batches with mlx-lm's loop for
    one prompt.
    """
    if method.temperature > 0:
        return None, None
    if method.batch_size is not None:
        alone = [answer.as_alone for run in runs.values() for answer in run]
        return None if None in alone else all(alone), None
    paired = [
        (run[0].run.token_ids, other[0].run.token_ids)
        for (group, repeat), run in runs.items()
        if (other := baseline.get((group, 0 if method.name == BASELINE else repeat)))
    ]
    total = sum(max(len(mine), len(other)) for mine, other in paired)
    if not total:
        return None, None
    agreeing = sum(common_prefix(mine, other) for mine, other in paired)
    return agreeing == total, agreeing / total
