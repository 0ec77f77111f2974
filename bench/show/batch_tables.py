"""What several users at once get, as tables of text."""

from __future__ import annotations

from collections.abc import Sequence

from redrafter_mlx.bench.analyse.serving import ServingRow
from redrafter_mlx.bench.show.tables import TextTable


def serving_table(rows: Sequence[ServingRow]) -> TextTable:
    """Servers under load."""
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
