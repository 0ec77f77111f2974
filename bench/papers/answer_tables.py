"""Tables of the papers that are measured with one request at a time."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np

from redrafter_mlx.bench.analyse.summary import Row
from redrafter_mlx.bench.measure.answers import Answer
from redrafter_mlx.bench.measure.likelihood import Likelihood
from redrafter_mlx.bench.papers.columns import paper_table, setting, settings_of, varying
from redrafter_mlx.bench.papers.evidence import Evidence
from redrafter_mlx.bench.papers.published import CHIPS, authors_grid, published
from redrafter_mlx.bench.show import tables
from redrafter_mlx.bench.show.tables import TextTable, number, spread
from redrafter_mlx.decoding.prefix_cache import common_prefix

STRETCH = 32
"""Number of consecutive answer tokens that are counted together."""


def shape_tables(evidence: Evidence) -> list[TextTable]:
    """Tabulate tokens per second by beam shape, next to the published figures of that shape.

    Published are float16, and for Vicuna 7B the authors' timings in bfloat16.
    """
    beside: dict[str, dict[tuple[str, object, object], str]] = {}
    for r in published("table2").records():
        found = f"{r['tok/s']}, {r['speedup']}x, {r['tokens/step']}"
        beside.setdefault(f"{r['machine']}, {r['target']}", {})["float16", r["W"], r["L"]] = found
    for chip, machine in CHIPS.items():
        for W, L, *cell in authors_grid(chip, "bfloat16").cells:
            found = "{:.2f}, {:.2f}x, {:.2f}".format(*cell)
            beside[f"{machine}, Vicuna 7B"]["bfloat16", W, L] = found
    lines = []
    for row in evidence.drafted:
        where = row.dtype, row.method.beam_width, row.method.beam_length
        ours = {"dtype": row.dtype, **tables.shape(row), **tables.figures(row)}
        theirs = {target: known.get(where, "") for target, known in beside.items()}
        lines.append((_settings(row), {**ours, **theirs}))
    title = "Beam shapes, and the published figures of the same shape and dtype"
    return [paper_table(title, lines, "published: tokens a second, speedup, tokens/step")]


def method_tables(evidence: Evidence) -> list[TextTable]:
    """Tabulate every drafter, and mlx-lm's speculative decoding, in total and by category."""
    lines = [
        (_settings(row),
         {"questions": row.category, "drafter": _drafter(row), "dtype": row.dtype,
          "asked": str(row.questions), **tables.figures(row)})
        for row in evidence.rows
        if row.method.name in ("redrafter", "mlx-lm speculative")
    ]  # fmt: skip
    title = "Drafters, over all questions and by category"
    return [paper_table(title, lines, shown=("draft tokens",))]


def label_tables(evidence: Evidence) -> list[TextTable]:
    """Tabulate drafters by their training labels, at each beam width."""
    beside = {(r["W"], r["labels"]): r for r in published("table4").records()}
    lines = []
    for row in evidence.drafted:
        options = evidence.options_of(row)
        labels = options.get("labels", "target") if options else "not known"
        texts = "given answers" if options.get("data") else "the target's own"
        found = beside.get((row.method.beam_width, labels))
        cells = {
            "drafter": _drafter(row), "labels": labels, "texts": texts if options else "not known",
            "W": tables.shape(row)["W"], "speedup": spread(row.speedup, "x"),
            "tokens/step": spread(row.tokens_per_step),
            "published": f"{found['speedup']}x, {found['tokens/step']}" if found else "",
        }  # fmt: skip
        lines.append((_settings(row), cells))
    return [paper_table("Drafters by their labels in training", lines)]


def merging_tables(evidence: Evidence) -> list[TextTable]:
    """Tabulate nodes with merged prefixes by beam width, and speed with and without merging."""
    lines = [
        (_settings(row),
         {**tables.shape(row), "prefixes": row.method.prefixes,
          **tables.merged(row, "tokens in beams", "nodes"),
          "query rows": number(row.query_rows, ".0f"), **tables.figures(row)})
        for row in evidence.drafted
        if row.nodes_before and row.nodes_after
    ]  # fmt: skip
    note = (
        "prefixes: separate is without merging (the root alone is shared), final the paper's "
        "merging, all also verifies prefixes that no candidate extends, in nodes that merging left "
        "free. A tree has a fixed number of query rows here, so that merging brings tokens/step "
        "rather than smaller calls; with --prefixes final, --max-nodes cuts the call."
    )
    return [paper_table("Nodes verified, merged and separately", lines, note)]


def acceptance_tables(evidence: Evidence) -> list[TextTable]:
    """Tabulate acceptance methods by temperature and thresholds: speed, and what they change."""
    greedy = {
        (a.dtype, a.question_id): a.run.token_ids
        for a in evidence.answers
        if a.method.name == "mlx-lm" and a.method.temperature == 0
    }
    lines = []
    for row in evidence.whole:
        m = row.method
        mine = evidence.answers_of(row)
        found = [known for a in mine if (known := evidence.likelihoods.get(a.key))]
        cells = {
            "method": m.name, "dtype": row.dtype, **tables.drawn(row),
            "epsilon": setting(m.epsilon), "delta": setting(m.delta), **tables.figures(row),
            "log-likelihood": _mean(found, [f.log_likelihood for f in found]),
            "entropy": _mean(found, [f.entropy for f in found]),
            "as greedy": _agreement(mine, greedy),
        }  # fmt: skip
        lines.append((_settings(row), cells))
    note = (
        "log-likelihood, entropy: nats a token under the target at temperature 1, means over the "
        "tokens of the answers; as greedy: tokens before the first that differs from the greedy "
        "answer, as a share"
    )
    return [paper_table("Acceptance methods", lines, note)]


def along_tables(evidence: Evidence) -> list[TextTable]:
    """Tabulate accepted drafts and tokens/step by the position of the step in the answer."""
    lines = []
    for row in evidence.drafted:
        for first, accepted in sorted(accepted_along(evidence.answers_of(row)).items()):
            cells = {
                "drafter": _drafter(row), "dtype": row.dtype,
                "tokens": f"{first}..{first + STRETCH - 1}", "steps": str(len(accepted)),
                "accepted drafts": f"{fmean(accepted):.2f}",
                "tokens/step": f"{1 + fmean(accepted):.2f}",
            }  # fmt: skip
            lines.append((_settings(row), cells))
    note = "tokens: of the answer before the step, the first being 1"
    return [paper_table("Drafts accepted along the answers", lines, note)]


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


def accepted_tables(evidence: Evidence) -> list[TextTable]:
    """Tabulate the steps by their number of accepted drafts, at each beam width."""
    found = {row: [n for answer in evidence.answers_of(row) for n in answer.run.accepted]
             for row in evidence.drafted}  # fmt: skip
    most = max((1 + n for steps in found.values() for n in steps), default=1)
    lines = []
    for row, steps in found.items():
        shares = {str(n): f"{steps.count(n) / max(1, len(steps)):.1%}" for n in range(most)}
        cells = {
            "drafter": _drafter(row), "dtype": row.dtype, "W": tables.shape(row)["W"],
            "steps": str(len(steps)), **shares, "tokens/step": spread(row.tokens_per_step),
        }  # fmt: skip
        lines.append((_settings(row), cells))
    note = "columns with a number: the share of the steps that accepted so many drafts"
    return [paper_table("Steps by their accepted drafts", lines, note)]


def rate_tables(evidence: Evidence) -> list[TextTable]:
    """Tabulate drafters by form and learning rate: acceptance, speed, and their correlation.

    A correlation is over the drafters that were measured in the same way.
    """
    rows = evidence.drafted
    varied = [heading for heading in varying(map(_settings, rows)) if heading != "drafter"]
    lines = []
    points: dict[str, dict[str, tuple[float, float]]] = {}
    for row in rows:
        settings, options = _settings(row), evidence.options_of(row)
        rate = options.get("training", {}).get("learning_rate", "not known")
        cells = {
            "drafter": _drafter(row), "form": options.get("drafter", {}).get("form", "not known"),
            "learning rate": setting(rate), "first draft accepted": tables.accepted_at(row, 1),
            **tables.figures(row),
        }  # fmt: skip
        lines.append((settings, cells))
        if row.acceptance and row.tps is not None:
            way = "".join(f", {heading} {setting(settings[heading])}" for heading in varied)
            points.setdefault(way, {})[_drafter(row)] = row.acceptance[0], row.tps.median
    notes = []
    for way, found in points.items():
        known = number(correlation([*found.values()]), ".2f") or "none with fewer than three"
        notes.append(f"over {len(found)} drafters{way}: {known}")
    note = f"correlation of acceptance and tokens a second {'; '.join(notes)}" if notes else ""
    return [paper_table("Acceptance against speed", lines, note)]


def correlation(points: Sequence[tuple[float, float]]) -> float | None:
    """Return Pearson's correlation; None for fewer than three points or a constant coordinate."""
    x, y = np.array(points, np.float64).reshape(-1, 2).T
    if len(points) < 3 or not (x.std() > 0 and y.std() > 0):
        return None
    return float(np.corrcoef(x, y)[0, 1])


def draft_model_tables(evidence: Evidence) -> list[TextTable]:
    """Tabulate acceptance, expected and measured speed, by temperature and number of drafts."""
    lines = []
    for row in evidence.drafted:
        drafts = (row.method.beam_length or 1) - 1
        share = drafts_accepted(row)
        cost = evidence.draft_costs.get(row.dtype)
        expected = None if share is None else expected_tokens(share, drafts)
        faster = None if expected is None or cost is None else expected / (1 + drafts * cost)
        cells = {
            "T": f"{row.method.temperature:g}", "accept": row.method.accept or "",
            "dtype": row.dtype, "drafts": str(drafts), "accepted": number(share, ".1%"),
            "c": number(cost, ".2f"), "expected tokens/step": number(expected, ".2f"),
            "tokens/step": spread(row.tokens_per_step),
            "expected speedup": number(faster, ".2f", "x"), "speedup": spread(row.speedup, "x"),
        }  # fmt: skip
        lines.append((_settings(row), cells))
    note = (
        "accepted: a, the share of the drafts that were reached and accepted; c: a draft's seconds "
        "over those of the target's call with one query row; expected: (1 - a^(n+1)) / (1 - a) "
        "tokens a step, over 1 + n c calls (arXiv 2211.17192, theorem 3.8, which holds where a "
        "call takes no longer with more query rows)"
    )
    return [paper_table("A draft model", lines, note, shown=("L",))]


def drafts_accepted(row: Row) -> float | None:
    """Return the acceptance rate of drafts whose parents were all accepted; None without drafts."""
    drafts = (row.method.beam_length or 1) - 1
    shares = [*row.acceptance, *([0.0] * drafts)][:drafts]
    reached = 1 + sum(shares[:-1])
    return sum(shares) / reached if drafts else None


def expected_tokens(accepted: float, drafts: int) -> float:
    """Return the expected tokens/step if drafts are accepted with this probability when reached."""
    return float(sum(accepted**depth for depth in range(drafts + 1)))


def _settings(row: Row) -> dict[str, object]:
    return settings_of(row.method, row.dtype)


def _drafter(row: Row) -> str:
    return tables.label(row) if row.method.name != "redrafter" else row.method.drafter or ""


def _mean(found: Sequence[Likelihood], values: Sequence[float]) -> str:
    """Return the mean of the texts' values over all tokens; empty without texts."""
    return f"{np.average(values, weights=[f.tokens for f in found]):.3f}" if found else ""


def _agreement(answers: Sequence[Answer], greedy: dict[tuple[str, int | str], list[int]]) -> str:
    """Return the tokens before the first difference, as a share of the greedy answer's tokens."""
    wanted = [(a, greedy.get((a.dtype, a.question_id), [])) for a in answers]
    same = sum(common_prefix(answer.run.token_ids, want) for answer, want in wanted)
    total = sum(len(want) for _, want in wanted)
    return f"{same / total:.1%}" if total else ""
