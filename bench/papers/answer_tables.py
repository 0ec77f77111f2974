"""Tables of the papers that are measured with one request at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from redrafter_mlx.bench.analyse.summary import Row
from redrafter_mlx.bench.measure.answers import Answer
from redrafter_mlx.bench.measure.methods import Method
from redrafter_mlx.bench.papers.columns import paper_table, setting, settings_of, varying
from redrafter_mlx.bench.papers.evidence import Evidence
from redrafter_mlx.bench.papers.published import CHIPS, authors_grid, published
from redrafter_mlx.bench.show.tables import TextTable, beam_side, label, spread
from redrafter_mlx.decoding.prefix_cache import common_prefix

STRETCH = 32
"""Number of consecutive answer tokens that are counted together."""


def shape_tables(evidence: Evidence) -> list[TextTable]:
    """Tabulate tokens per second by beam shape, next to the published figures of that shape.

    Published are float16, and for Vicuna 7B the authors' timings in bfloat16.
    """
    beside: dict[str, dict[tuple[str, int, int], str]] = {}
    for r in published("table2").records():
        figures = f"{r['tok/s']}, {r['speedup']}x, {r['tokens/step']}"
        where = "float16", int(r["W"] or 0), int(r["L"] or 0)
        beside.setdefault(f"{r['machine']}, {r['target']}", {})[where] = figures
    for chip, machine in CHIPS.items():
        for cell in authors_grid(chip, "bfloat16").cells:
            figures = f"{cell.tps:.2f}, {cell.speedup:.2f}x, {cell.tokens_per_step:.2f}"
            where = "bfloat16", cell.beam_width, cell.beam_length
            beside[f"{machine}, Vicuna 7B"][where] = figures
    lines = []
    for row in evidence.drafted:
        where = row.dtype, row.method.beam_width or 0, row.method.beam_length or 0
        published_too = (found.get(where, "") for found in beside.values())
        cells = (row.dtype, *_shape(row), *_figures(row), *published_too)
        lines.append((_settings(row), cells))
    title = "Beam shapes, and the published figures of the same shape and dtype"
    columns = ("dtype", "W", "L", "tok/s", "speedup", "tokens/step", *beside)
    note = "published: tokens a second, speedup, tokens/step"
    return [paper_table(title, columns, lines, note)]


def method_tables(evidence: Evidence) -> list[TextTable]:
    """Tabulate every drafter, and mlx-lm's speculative decoding, in total and by category."""
    lines = [
        (_settings(row),
         (row.category, _drafter(row), row.dtype, str(row.questions), *_figures(row)))
        for row in evidence.rows
        if row.method.name in ("redrafter", "mlx-lm speculative")
    ]  # fmt: skip
    title = "Drafters, over all questions and by category"
    columns = ("questions", "drafter", "dtype", "asked", "tok/s", "speedup", "tokens/step")
    return [paper_table(title, columns, lines, shown=("draft tokens",))]


def label_tables(evidence: Evidence) -> list[TextTable]:
    """Tabulate drafters by their training labels, at each beam width."""
    beside = {(r["W"], r["labels"]): r for r in published("table4").records()}
    lines = []
    for row in evidence.drafted:
        name = row.method.drafter or ""
        options = evidence.options.get(name, {})
        labels = options.get("labels", "target")
        text = "given answers" if options.get("data") else "the target's own"
        found = beside.get((row.method.beam_width, labels))
        cells = (
            name, labels if options else "not known", text if options else "not known",
            _shape(row)[0], *_figures(row)[1:],
            f"{found['speedup']}x, {found['tokens/step']}" if found and options else "",
        )  # fmt: skip
        lines.append((_settings(row), cells))
    columns = ("drafter", "labels", "texts", "W", "speedup", "tokens/step", "published")
    return [paper_table("Drafters by their labels in training", columns, lines)]


def merging_tables(evidence: Evidence) -> list[TextTable]:
    """Tabulate nodes with merged prefixes by beam width, and speed with and without merging."""
    lines = []
    for row in evidence.drafted:
        before, after = row.nodes_before, row.nodes_after
        if before is None or after is None or row.nodes is None:
            continue
        saved = 1 - row.nodes / before.median
        cells = (
            *_shape(row), row.method.prefixes, f"{before.median:g}",
            *(f"{v:g}" for v in (after.p1, after.median, after.p99)), f"{saved:.0%}",
            "" if row.query_rows is None else f"{row.query_rows:.0f}", *_figures(row),
        )  # fmt: skip
        lines.append((_settings(row), cells))
    columns = ("W", "L", "prefixes", "tokens in beams", "nodes: 1%", "median", "99%", "saved",
               "query rows", "tok/s", "speedup", "tokens/step")  # fmt: skip
    note = (
        "prefixes: separate is without merging (the root alone is shared), final the paper's "
        "merging, all also verifies prefixes that no candidate extends, in nodes that merging left "
        "free. A tree has a fixed number of query rows here, so that merging brings tokens/step "
        "rather than smaller calls; with --prefixes final, --max-nodes cuts the call."
    )
    return [paper_table("Nodes verified, merged and separately", columns, lines, note)]


def acceptance_tables(evidence: Evidence) -> list[TextTable]:
    """Tabulate acceptance methods by temperature and thresholds.

    Columns: speed, likelihood and entropy under the target, and agreement with greedy answers.
    """
    greedy = {
        (a.dtype, a.question_id): a.run.token_ids
        for a in evidence.answers
        if a.method.name == "mlx-lm" and a.method.temperature == 0
    }
    lines = []
    for row in evidence.whole:
        m = row.method
        mine = [a for a in evidence.answers if (a.dtype, a.method) == (row.dtype, m)]
        found = [known for a in mine if (known := evidence.likelihoods.get(a.key))]
        tokens = sum(f.tokens for f in found)
        mean = [
            f"{sum(f.tokens * value for f, value in zip(found, values, strict=True)) / tokens:.3f}"
            for values in ([f.log_likelihood for f in found], [f.entropy for f in found])
        ] if tokens else ["", ""]  # fmt: skip
        cells = (
            m.name, row.dtype, m.accept or "", f"{m.temperature:g}", setting(m.epsilon),
            setting(m.delta), *_figures(row), *mean, _agreement(mine, greedy),
        )  # fmt: skip
        lines.append((_settings(row), cells))
    columns = ("method", "dtype", "accept", "T", "epsilon", "delta", "tok/s", "speedup",
               "tokens/step", "log-likelihood", "entropy", "as greedy")  # fmt: skip
    note = (
        "log-likelihood, entropy: nats a token under the target at temperature 1, means over the "
        "tokens of the answers; as greedy: tokens before the first that differs from the greedy "
        "answer, as a share"
    )
    return [paper_table("Acceptance methods", columns, lines, note)]


def along_tables(evidence: Evidence) -> list[TextTable]:
    """Tabulate accepted drafts and tokens/step by the position of the step in the answer."""
    lines = []
    for row in evidence.drafted:
        for first, accepted in sorted(accepted_along(evidence.answers_of(row)).items()):
            cells = (
                row.method.drafter or "", row.dtype, f"{first}..{first + STRETCH - 1}",
                str(len(accepted)), f"{fmean(accepted):.2f}", f"{1 + fmean(accepted):.2f}",
            )  # fmt: skip
            lines.append((_settings(row), cells))
    columns = ("drafter", "dtype", "tokens", "steps", "accepted drafts", "tokens/step")
    note = "tokens: of the answer before the step, the first being 1"
    return [paper_table("Drafts accepted along the answers", columns, lines, note)]


def accepted_along(answers: Sequence[Answer]) -> dict[int, list[int]]:
    """Group the drafts accepted per step by the first token of the stretch where it began."""
    found: dict[int, list[int]] = {}
    for answer in answers:
        tokens = 1
        for emitted, accepted in zip(
            answer.run.accept_lengths, answer.run.accepted, strict=True
        ):  # fmt: skip
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
        shares = (f"{steps.count(n) / max(1, len(steps)):.1%}" for n in range(most))
        cells = (
            row.method.drafter or "", row.dtype, _shape(row)[0], str(len(steps)), *shares,
            _figures(row)[2],
        )  # fmt: skip
        lines.append((_settings(row), cells))
    columns = ("drafter", "dtype", "W", "steps", *map(str, range(most)), "tokens/step")
    note = "columns with a number: the share of the steps that accepted so many drafts"
    return [paper_table("Steps by their accepted drafts", columns, lines, note)]


def rate_tables(evidence: Evidence) -> list[TextTable]:
    """Tabulate drafters by form and learning rate: acceptance, speed, and their correlation.

    A correlation is over the drafters that were measured in the same way.
    """
    lines = []
    points: dict[tuple[str, Method], dict[str, tuple[float, float]]] = {}
    for row in evidence.drafted:
        name = row.method.drafter or ""
        options = evidence.options.get(name, {})
        training, form = options.get("training", {}), options.get("drafter", {})
        cells = (
            name, str(form.get("form", "not known")),
            f"{training['learning_rate']:g}" if "learning_rate" in training else "not known",
            f"{row.acceptance[0]:.1%}" if row.acceptance else "", *_figures(row),
        )  # fmt: skip
        lines.append((_settings(row), cells))
        if row.acceptance and row.tps is not None:
            way = row.dtype, replace(row.method, drafter=None)
            points.setdefault(way, {})[name] = row.acceptance[0], row.tps.median
    columns = ("drafter", "form", "learning rate", "first draft accepted", "tok/s", "speedup",
               "tokens/step")  # fmt: skip
    varied = [heading for heading in varying(each for each, _ in lines) if heading != "drafter"]
    notes = []
    for (dtype, method), found in points.items():
        settings = settings_of(method, dtype)
        which = "".join(f", {heading} {setting(settings[heading])}" for heading in varied)
        r = correlation([*found.values()])
        known = "none with fewer than three" if r is None else f"{r:.2f}"
        notes.append(f"over {len(found)} drafters{which}: {known}")
    note = f"correlation of acceptance and tokens a second {'; '.join(notes)}" if notes else ""
    return [paper_table("Acceptance against speed", columns, lines, note)]


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
        cells = (
            f"{row.method.temperature:g}", row.method.accept or "", row.dtype, str(drafts),
            "" if share is None else f"{share:.1%}", "" if cost is None else f"{cost:.2f}",
            "" if expected is None else f"{expected:.2f}", spread(row.tokens_per_step),
            "" if faster is None else f"{faster:.2f}x", spread(row.speedup, "x"),
        )  # fmt: skip
        lines.append((_settings(row), cells))
    columns = ("T", "accept", "dtype", "drafts", "accepted", "c", "expected tokens/step",
               "tokens/step", "expected speedup", "speedup")  # fmt: skip
    note = (
        "accepted: a, the share of the drafts that were reached and accepted; c: a draft's seconds "
        "over those of the target's call with one query row; expected: (1 - a^(n+1)) / (1 - a) "
        "tokens a step, over 1 + n c calls (arXiv 2211.17192, theorem 3.8, which holds where a "
        "call takes no longer with more query rows)"
    )
    return [paper_table("A draft model", columns, lines, note, shown=("L",))]


def drafts_accepted(row: Row) -> float | None:
    """Return the acceptance rate of drafts whose parents were all accepted; None without drafts."""
    drafts = (row.method.beam_length or 1) - 1
    shares = [*row.acceptance, *([0.0] * drafts)][:drafts]
    reached = 1 + sum(shares[:-1])
    return sum(shares) / reached if drafts else None


def expected_tokens(accepted: float, drafts: int) -> float:
    """Return the expected tokens/step with this many drafts.

    accepted: probability that a draft is accepted if it is reached
    """
    return float(sum(accepted**depth for depth in range(drafts + 1)))


def _figures(row: Row) -> tuple[str, str, str]:
    return spread(row.tps), spread(row.speedup, "x"), spread(row.tokens_per_step)


def _settings(row: Row) -> dict[str, object]:
    return settings_of(row.method, row.dtype)


def _shape(row: Row) -> tuple[str, str]:
    m = row.method
    return beam_side(m, m.beam_width), beam_side(m, m.beam_length)


def _drafter(row: Row) -> str:
    return label(row) if row.method.name != "redrafter" else row.method.drafter or ""


def _agreement(answers: Sequence[Answer], greedy: dict[tuple[str, int | str], list[int]]) -> str:
    """Return the tokens before the first difference, as a share of the greedy answer's tokens."""
    same = total = 0
    for answer in answers:
        want = greedy.get((answer.dtype, answer.question_id))
        if want:
            same += common_prefix(answer.run.token_ids, want)
            total += len(want)
    return f"{same / total:.1%}" if total else ""
