"""Tables of the papers that are measured with several concurrent requests."""

from __future__ import annotations

from redrafter_mlx.bench.analyse.batch_summary import BatchRow
from redrafter_mlx.bench.papers.columns import Settings, paper_table, setting, settings_of
from redrafter_mlx.bench.papers.evidence import Evidence
from redrafter_mlx.bench.show.tables import TextTable, beam_side, spread


def batch_tables(evidence: Evidence) -> list[TextTable]:
    """Tabulate tokens per second, per request and in total, by beam width and requests."""
    lines = [
        (_settings(length, row),
         (_width(row), str(row.size), spread(row.request_tps), spread(row.total_tps),
          spread(row.over_plain, "x"), f"{row.tokens_per_step:.2f}"))
        for length, row in evidence.batches
    ]  # fmt: skip
    columns = ("W", "requests", "tok/s each", "total tok/s", "over no drafts", "tokens/step")
    return [paper_table("Requests at once by beam width", columns, lines)]


def latency_tables(evidence: Evidence) -> list[TextTable]:
    """Tabulate a request's milliseconds per token, by prompt length, requests and candidates k."""
    lines = [
        (_settings(length, row),
         (setting(length), str(row.size), _width(row), _milliseconds(row),
          spread(row.over_plain, "x"), f"{row.tokens_per_step:.2f}"))
        for length, row in evidence.batches
    ]  # fmt: skip
    columns = ("prompt tokens", "requests", "k", "ms a token", "over no drafts", "tokens/step")
    note = "k: candidates, the beam width; timed after every request's first token"
    title = "Milliseconds a token of a request"
    return [paper_table(title, columns, lines, note, shown=("W",))]


def _settings(length: int | None, row: BatchRow) -> Settings:
    return {"prompt tokens": length, **settings_of(row.method)}


def _width(row: BatchRow) -> str:
    if row.method.name != "redrafter":
        return "mlx-lm" if row.method.name == "mlx-lm" else "no drafts"
    return beam_side(row.method, row.method.beam_width)


def _milliseconds(row: BatchRow) -> str:
    each = row.request_tps
    return "" if each is None or each.median <= 0 else f"{1000 / each.median:.1f}"
