"""Tables of text for batches, and for servers under load."""

from __future__ import annotations

from collections.abc import Sequence

from redrafter_mlx.bench.analyse.batch_summary import BatchRow
from redrafter_mlx.bench.analyse.serving import ServingRow
from redrafter_mlx.bench.show.tables import TextTable, beam_side, label, spread


def serving_table(rows: Sequence[ServingRow]) -> TextTable:
    """Return a table of servers under load."""
    several = len({row.url for row in rows}) > 1
    columns = ["server", "users", "answers", "total tok/s", "tok/s each", "first token", "95%"]
    cells = [
        (
            row.url,
            str(row.users),
            str(row.answers),
            f"{row.total_tps:.2f}",
            f"{row.user_tps:.2f}",
            f"{1000 * row.first_token:.0f} ms",
            f"{1000 * row.slowest_first_token:.0f} ms",
            *((f"{row.speedup:.2f}x", f"{row.same_text:.0%}") if several else ()),
        )
        for row in rows
    ]
    columns += ["over the first", "same text"] if several else []
    return TextTable("Servers by users at once", tuple(columns), tuple(cells))


def batch_table(rows: Sequence[BatchRow]) -> TextTable:
    """Return a table of batch sizes and methods, as in the paper's Table 3."""
    sampled = any(row.method.temperature > 0 for row in rows)
    columns = (
        "batch", "method", *(("accept", "T") if sampled else ()), "W", "L",
        "tok/s each", "total tok/s", "over mlx-lm's batch",
        "over plain", "tokens/step", "first token", "peak", "mlx-lm's tokens",
    )  # fmt: skip
    cells = [
        (
            str(row.size),
            label(row),
            *((row.method.accept or "", f"{row.method.temperature:g}") if sampled else ()),
            beam_side(row.method, row.method.beam_width),
            beam_side(row.method, row.method.beam_length),
            spread(row.request_tps),
            spread(row.total_tps),
            spread(row.speedup, "x"),
            spread(row.over_plain, "x"),
            f"{row.tokens_per_step:.2f}",
            f"{1000 * row.first_seconds:.0f} ms",
            f"{row.peak_memory:.2f} GB",
            {True: "yes", False: "NO", None: ""}[row.matches_plain],
        )
        for row in rows
    ]
    note = (
        "batch: requests at once; first token: when each of them has it and the clock starts; "
        "over plain: over our own batches without drafts"
    )
    return TextTable("Requests at once", columns, tuple(cells), note)
