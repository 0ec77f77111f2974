"""Tables of text for batches, and for servers under load."""

from __future__ import annotations

from collections.abc import Sequence

from redrafter_mlx.bench.analyse.batch_summary import BatchRow
from redrafter_mlx.bench.analyse.serving import ServingRow
from redrafter_mlx.bench.show.tables import TextTable, drawn, label, shape, spread

OUT_OF_MEMORY = "OOM"
"""Cell of a batch that does not fit in memory, as the papers have it."""


def serving_table(rows: Sequence[ServingRow]) -> TextTable:
    """Return a table of servers under load."""
    several = len({row.url for row in rows}) > 1
    lines = []
    for row in rows:
        compared = {"over the first": f"{row.speedup:.2f}x", "same text": f"{row.same_text:.0%}"}
        lines.append(
            {
                "server": row.url,
                "users": str(row.users),
                "answers": str(row.answers),
                "total tok/s": f"{row.total_tps:.2f}",
                "tok/s each": f"{row.user_tps:.2f}",
                "first token": f"{1000 * row.first_token:.0f} ms",
                "95%": f"{1000 * row.slowest_first_token:.0f} ms",
                **(compared if several else {}),
            }
        )
    return TextTable.of("Servers by users at once", lines)


def batch_table(rows: Sequence[BatchRow]) -> TextTable:
    """Return a table of batch sizes and methods, as in the paper's Table 3."""
    sampled = any(row.method.temperature > 0 for row in rows)
    lines = [
        {
            "batch": str(row.size),
            "method": label(row),
            **(drawn(row) if sampled else {}),
            **shape(row),
            "tok/s each": OUT_OF_MEMORY if row.out_of_memory else spread(row.request_tps),
            "total tok/s": spread(row.total_tps),
            "over mlx-lm's batch": spread(row.speedup, "x"),
            "over plain": spread(row.over_plain, "x"),
            "tokens/step": "" if row.out_of_memory else f"{row.tokens_per_step:.2f}",
            "first token": "" if row.out_of_memory else f"{1000 * row.first_seconds:.0f} ms",
            "peak": f"{row.peak_memory:.2f} GB",
            "mlx-lm's tokens": {True: "yes", False: "NO", None: ""}[row.matches_plain],
        }
        for row in rows
    ]
    note = (
        "batch: requests at once; first token: when each of them has it and the clock starts; "
        "over plain: over our own batches without drafts"
    ) + ("; OOM: does not fit in memory" if any(row.out_of_memory for row in rows) else "")
    return TextTable.of("Requests at once", lines, note)
