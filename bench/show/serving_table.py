"""The table of `bench serve`."""

from __future__ import annotations

from collections.abc import Sequence

from redrafter_mlx.bench.analyse.serving import ServingRow
from redrafter_mlx.bench.show.tables import TextTable


def serving_table(rows: Sequence[ServingRow]) -> TextTable:
    """Return a table of servers under load."""
    several = len({row.url for row in rows}) > 1
    by_category = len({row.category for row in rows}) > 1
    lines = []
    for row in rows:
        compared = {"over the first": f"{row.speedup:.2f}x", "same text": f"{row.same_text:.0%}"}
        lines.append(
            {
                "server": row.url,
                "users": str(row.users),
                **({"questions": row.category} if by_category else {}),
                "answers": str(row.answers),
                "total tok/s": f"{row.total_tps:.2f}",
                "tok/s each": f"{row.user_tps:.2f}",
                "first token": f"{1000 * row.first_token:.0f} ms",
                "95%": f"{1000 * row.slowest_first_token:.0f} ms",
                **(compared if several else {}),
            }
        )
    return TextTable.of("Servers by users at once", lines)
