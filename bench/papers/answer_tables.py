"""Columns of the papers' tables, and the tables by what has a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from redrafter_mlx.bench.analyse.summary import Row
from redrafter_mlx.bench.measure.answers import Answer
from redrafter_mlx.bench.measure.likelihood import Likelihood
from redrafter_mlx.bench.measure.methods import BASELINE, Method
from redrafter_mlx.bench.papers.columns import Layout, paper_table, setting, settings_of, varying
from redrafter_mlx.bench.papers.evidence import Evidence
from redrafter_mlx.bench.papers.published import Record
from redrafter_mlx.bench.show import tables
from redrafter_mlx.bench.show.tables import OUT_OF_MEMORY, TextTable, number, spread
from redrafter_mlx.decoding.cache.prefix_cache import common_prefix

STRETCH = 32
"""Number of consecutive answer tokens that are counted together."""

_UNKNOWN = "not known"  # a training option of a drafter whose folder holds none


_MERGED = ("tokens in beams", "nodes: 1%", "median", "99%", "saved")


def _merged(heading: str, _: Evidence, row: Row) -> str:
    return tables.merged(row, "tokens in beams", "nodes")[heading]


_SETTINGS = ("prompt tokens", "requests", "W", "k")
_TIMES = ("tok/s each", "total tok/s", "ms a token")
"""Columns of a batch that does not fit in memory: these, and those that say so."""

COLUMNS: Mapping[str, Callable[[Evidence, Row], str]] = {
    "questions": lambda _, row: row.category,
    "asked": lambda _, row: str(row.questions),
    "dtype": lambda _, row: row.dtype,
    "method": lambda _, row: row.method.name,
    "drafter": lambda _, row: _drafter(row),
    "drafter or method": lambda _, row: row.method.drafter or tables.label(row),
    "size": lambda known, row: number(_millions(known, row), ",.1f", "M"),
    "form": lambda known, row: str(_trained(known, row, "drafter").get("form", _UNKNOWN)),
    "labels": lambda known, row: _labels(known, row),
    "texts": lambda known, row: _texts(known, row),
    "learning rate": lambda known, row: setting(
        _trained(known, row, "training").get("learning_rate", _UNKNOWN)
    ),
    "accept": lambda _, row: row.method.accept or "",
    "T": lambda _, row: f"{row.method.temperature:g}",
    "epsilon": lambda _, row: setting(row.method.epsilon),
    "delta": lambda _, row: setting(row.method.delta),
    "prompt tokens": lambda _, row: setting(row.prompt_tokens),
    "requests": lambda _, row: setting(row.method.batch_size),
    "W": lambda _, row: _width(row, "no drafts"),
    "k": lambda _, row: _width(row, "0"),
    "L": lambda _, row: tables.shape(row)["L"],
    "drafts": lambda _, row: str(_drafts(row)),
    "prefixes": lambda _, row: row.method.prefixes,
    "query rows": lambda _, row: number(row.query_rows, ".0f"),
    "tok/s": lambda _, row: spread(row.tps),
    "tok/s each": lambda _, row: spread(row.tps),
    "total tok/s": lambda _, row: spread(row.total_tps),
    "ms a token": lambda _, row: number(
        1000 / row.tps.median if row.tps and row.tps.median else None, ".1f"
    ),
    "speedup": lambda _, row: spread(row.speedup, "x"),
    "over no drafts": lambda _, row: spread(row.over_plain, "x"),
    "over greedy": lambda known, row: number(_over_greedy(known, row), ".2f", "x"),
    "tokens/step": lambda _, row: spread(row.tokens_per_step),
    "log-likelihood": lambda known, row: _mean(known, row, lambda found: found.log_likelihood),
    "entropy": lambda known, row: _mean(known, row, lambda found: found.entropy),
    "as greedy": lambda known, row: _agreement(known, row),
    "accuracy": lambda known, row: number(_accuracy(known, row), ".1%"),
    "last draft accepted": lambda _, row: number(_last_accepted(row), ".1%"),
    "accepted": lambda _, row: number(drafts_accepted(row), ".1%"),
    "c": lambda known, row: number(known.draft_costs.get(row.dtype), ".2f"),
    "expected tokens/step": lambda _, row: number(_expected(row), ".2f"),
    "expected speedup": lambda known, row: number(_expected_speedup(known, row), ".2f", "x"),
    **{heading: partial(_merged, heading) for heading in _MERGED},
}


def rows_table(
    rows: Callable[[Evidence], Sequence[Row]],
    layout: Layout,
    evidence: Evidence,
    known: Sequence[Record],
    note: Callable[[Evidence], str] = lambda _: "",
) -> TextTable:
    """Return the table of some of the measured rows, see `Layout`; `known` are the published."""

    def cell(row: Row, heading: str) -> str:
        if row.out_of_memory and heading not in _SETTINGS:
            return OUT_OF_MEMORY if heading in _TIMES else ""
        return COLUMNS[heading](evidence, row)

    shown = rows(evidence)
    lines = [
        (settings_of(row.method, row.dtype, row.prompt_tokens), partial(cell, row)) for row in shown
    ]
    too_large = f"{OUT_OF_MEMORY}: does not fit in memory"
    more = too_large if any(row.out_of_memory for row in shown) else note(evidence)
    return paper_table(layout, lines, known, more)


def along_table(layout: Layout, evidence: Evidence, known: Sequence[Record]) -> TextTable:
    """Return accepted drafts and tokens/step by the position of the step in the answer."""
    lines = []
    for row in evidence.drafted:
        for first, accepted in sorted(accepted_along(evidence.answers_of(row)).items()):
            cells = {
                "drafter": _drafter(row),
                "tokens": f"{first}..{first + STRETCH - 1}", "steps": str(len(accepted)),
                "accepted drafts": f"{fmean(accepted):.2f}",
                "tokens/step": f"{1 + fmean(accepted):.2f}",
            }  # fmt: skip
            lines.append((settings_of(row.method, row.dtype), cells.__getitem__))
    return paper_table(layout, lines, known)


def accepted_along(answers: Sequence[Answer]) -> dict[int, list[int]]:
    """Group the drafts accepted per step by the first token of the stretch where it began."""
    found: dict[int, list[int]] = {}
    for answer in answers:
        tokens = 1
        for emitted, accepted in zip(answer.run.accept_lengths, answer.run.accepted, strict=True):
            first = (tokens - 1) // STRETCH * STRETCH + 1
            found.setdefault(first, []).append(accepted)
            tokens += emitted
    return found


def correlation_note(evidence: Evidence) -> str:
    """Correlate accuracy with tokens a second, over drafters that were measured in the same way."""
    rows = [row for row in evidence.drafted if row.tps is not None]
    settings = {row: settings_of(row.method, row.dtype) for row in rows}
    varied = [heading for heading in varying(settings.values()) if heading != "drafter"]
    measures: dict[str, Callable[[Row], float | None]]
    measures = {"accuracy": partial(_accuracy, evidence), "last draft accepted": _last_accepted}
    notes = []
    for name, measure in measures.items():
        points: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            way = "".join(f", {heading} {setting(settings[row][heading])}" for heading in varied)
            if (share := measure(row)) is not None and row.tps is not None:
                points.setdefault(way, []).append((share, row.tps.median))
        for way, found in points.items():
            known = number(correlation(found), ".3f") or "none, for too few or too similar"
            notes.append(f"{name} over {len(found)} drafters{way}: {known}")
    return f"correlation with tokens a second: {'; '.join(notes)}" if notes else ""


def correlation(points: Sequence[tuple[float, float]]) -> float | None:
    """Return Pearson's correlation; None for fewer than three points or a constant coordinate."""
    x, y = np.array(points, np.float64).reshape(-1, 2).T
    if len(points) < 3 or not (x.std() > 0 and y.std() > 0):
        return None
    return float(np.corrcoef(x, y)[0, 1])


def drafts_accepted(row: Row) -> float | None:
    """Return the acceptance rate of drafts whose parents were all accepted; None without drafts."""
    shares = [*row.acceptance, *([0.0] * _drafts(row))][: _drafts(row)]
    reached = 1 + sum(shares[:-1])
    return sum(shares) / reached if shares else None


def expected_tokens(accepted: float, drafts: int) -> float:
    """Return the expected tokens/step if drafts are accepted with this probability when reached."""
    return float(sum(accepted**depth for depth in range(drafts + 1)))


def _expected(row: Row) -> float | None:
    share = drafts_accepted(row)
    return None if share is None else expected_tokens(share, _drafts(row))


def _expected_speedup(evidence: Evidence, row: Row) -> float | None:
    expected, cost = _expected(row), evidence.draft_costs.get(row.dtype)
    return None if expected is None or cost is None else expected / (1 + _drafts(row) * cost)


def _width(row: Row, plain: str) -> str:
    """Return the beam width; in batches, which are compared by it, also what has none."""
    if row.method.batch_size is None or row.method.name == "redrafter":
        return tables.beam_side(row.method, row.method.beam_width)
    return "mlx-lm" if row.method.name == "mlx-lm" else plain


def _drafts(row: Row) -> int:
    return (row.method.beam_length or 1) - 1


def _drafter(row: Row) -> str:
    return tables.label(row) if row.method.name != "redrafter" else row.method.drafter or ""


def _millions(evidence: Evidence, row: Row) -> float | None:
    """Return the millions of parameters of a row's drafter; None without one."""
    size = evidence.sizes.get(row.method.drafter) if row.method.name == "redrafter" else None
    return size and size / 1e6


def _trained(evidence: Evidence, row: Row, table: str) -> Mapping[str, Any]:
    """Return a table of the options that a row's drafter was trained with."""
    found: Mapping[str, Any] = evidence.options_of(row).get(table, {})
    return found


def _labels(evidence: Evidence, row: Row) -> str:
    options = evidence.options_of(row)
    return str(options.get("labels", "target")) if options else _UNKNOWN


def _texts(evidence: Evidence, row: Row) -> str:
    options = evidence.options_of(row)
    texts = "given answers" if options.get("data") else "the target's own"
    return texts if options else _UNKNOWN


def _accuracy(evidence: Evidence, row: Row) -> float | None:
    """Return the held-out accuracy at the last position that a row's drafter was trained for.

    It is that of the evaluation whose weights were kept. None for a drafter without a log.
    """
    kept = [record for record in evidence.logs.get(row.method.drafter, ()) if record.get("best")]
    return kept[-1]["top1"][-1] if kept else None


def _last_accepted(row: Row) -> float | None:
    """Return the share of the steps that accepted their last draft; None without drafts."""
    drafts = _drafts(row)
    return dict(enumerate(row.acceptance, 1)).get(drafts, 0.0) if drafts else None


def _over_greedy(evidence: Evidence, row: Row) -> float | None:
    """Return tokens a second over those of mlx-lm's greedy answers."""
    greedy = Method(BASELINE)
    found = [r.tps for r in evidence.whole if (r.method, r.dtype) == (greedy, row.dtype)]
    return row.tps.median / found[0].median if row.tps and found and found[0] else None


def _mean(evidence: Evidence, row: Row, value: Callable[[Likelihood], float]) -> str:
    """Return the mean of a row's texts over all their tokens; empty without texts."""
    known = [evidence.likelihoods.get(answer.key) for answer in evidence.answers_of(row)]
    found = [each for each in known if each is not None]
    weights = [each.tokens for each in found]
    return f"{np.average([*map(value, found)], weights=weights):.3f}" if found else ""


def _agreement(evidence: Evidence, row: Row) -> str:
    """Return the tokens before the first difference, as a share of the greedy answers' tokens."""
    greedy = {
        (a.dtype, a.question_id): a.run.token_ids
        for a in evidence.answers
        if a.method == Method(BASELINE)
    }
    answers = evidence.answers_of(row)
    wanted = [greedy.get((a.dtype, a.question_id), []) for a in answers]
    total = sum(map(len, wanted))
    same = sum(common_prefix(a.run.token_ids, w) for a, w in zip(answers, wanted, strict=True))
    return f"{same / total:.1%}" if total else ""
