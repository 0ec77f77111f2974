"""Tables of the papers that are measured with several concurrent requests."""

from __future__ import annotations

from redrafter_mlx.bench.analyse.batch_summary import BatchRow
from redrafter_mlx.bench.papers.columns import Settings, paper_table, setting, settings_of
from redrafter_mlx.bench.papers.evidence import Evidence
from redrafter_mlx.bench.show.tables import TextTable, beam_side, number, spread


def batch_tables(evidence: Evidence) -> list[TextTable]:
    """Tabulate tokens per second, per request and in total, by beam width and requests."""
    lines = [
        (_settings(length, row),
         {"W": _width(row), "requests": str(row.size), "tok/s each": spread(row.request_tps),
          "total tok/s": spread(row.total_tps), "over no drafts": spread(row.over_plain, "x"),
          "tokens/step": f"{row.tokens_per_step:.2f}"})
        for length, row in evidence.batches
    ]  # fmt: skip
    return [paper_table("Requests at once by beam width", lines)]


def latency_tables(evidence: Evidence) -> list[TextTable]:
    """Tabulate a request's milliseconds per token, by prompt length, requests and candidates k."""
    lines = [
        (_settings(length, row),
         {"prompt tokens": setting(length), "requests": str(row.size), "k": _width(row),
          "ms a token": number(1000 / tps.median, ".1f") if tps and tps.median else "",
          "over no drafts": spread(row.over_plain, "x"),
          "tokens/step": f"{row.tokens_per_step:.2f}"})
        for length, row in evidence.batches
        for tps in [row.request_tps]
    ]  # fmt: skip
    note = "k: candidates, the beam width; timed after every request's first token"
    return [paper_table("Milliseconds a token of a request", lines, note, shown=("W",))]


def _settings(length: int | None, row: BatchRow) -> Settings:
    return {"prompt tokens": length, **settings_of(row.method)}


def _width(row: BatchRow) -> str:
    if row.method.name != "redrafter":
        return "mlx-lm" if row.method.name == "mlx-lm" else "no drafts"
    return beam_side(row.method, row.method.beam_width)
