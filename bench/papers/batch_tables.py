"""Tables of the papers that are measured with several concurrent requests."""

from __future__ import annotations

from redrafter_mlx.bench.analyse.batch_summary import BatchRow
from redrafter_mlx.bench.papers.evidence import Evidence
from redrafter_mlx.bench.show.tables import TextTable, spread


def batch_tables(evidence: Evidence) -> list[TextTable]:
    """Tabulate tokens per second, per request and in total, by beam width and requests."""
    cells = tuple(
        (_width(row), str(row.size), spread(row.request_tps), spread(row.total_tps),
         spread(row.over_plain, "x"), f"{row.tokens_per_step:.2f}")
        for _, row in evidence.batches
    )  # fmt: skip
    columns = ("W", "requests", "tok/s each", "total tok/s", "over no drafts", "tokens/step")
    return [TextTable("Requests at once by beam width", columns, cells)]


def latency_tables(evidence: Evidence) -> list[TextTable]:
    """Tabulate a request's milliseconds per token, by prompt length, requests and candidates k."""
    cells = tuple(
        ("" if length is None else str(length), str(row.size), _width(row), _milliseconds(row),
         spread(row.over_plain, "x"), f"{row.tokens_per_step:.2f}")
        for length, row in evidence.batches
    )  # fmt: skip
    columns = ("prompt tokens", "requests", "k", "ms a token", "over no drafts", "tokens/step")
    note = "k: candidates, the beam width; timed after every request's first token"
    return [TextTable("Milliseconds a token of a request", columns, cells, note)]


def _width(row: BatchRow) -> str:
    if row.method.name != "redrafter":
        return "mlx-lm" if row.method.name == "mlx-lm" else "no drafts"
    return "auto" if row.method.beam_width is None else str(row.method.beam_width)


def _milliseconds(row: BatchRow) -> str:
    each = row.request_tps
    return "" if each is None or each.median <= 0 else f"{1000 / each.median:.1f}"
