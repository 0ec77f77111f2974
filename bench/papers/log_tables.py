"""Tables of the papers that are made from the logs of training runs."""

from __future__ import annotations

from itertools import zip_longest

from redrafter_mlx.bench.papers.evidence import Evidence
from redrafter_mlx.bench.show.tables import TextTable, number


def accuracy_tables(evidence: Evidence) -> list[TextTable]:
    """Tabulate accuracy by the draft's position, at each evaluation of each run."""
    tables = []
    for folder, log in evidence.logs.items():
        losses = {record["step"]: record["loss"] for record in log if record["event"] == "step"}
        lines = []
        for record in (each for each in log if each["event"] == "evaluation"):
            shares = zip_longest(record.get("training_top1", ()), record["top1"])
            drafts = {
                f"draft {n}": f"{number(training, '.1%') or 'not logged'} / {held_out:.1%}"
                for n, (training, held_out) in enumerate(shares, 1)
            }
            loss = number(losses.get(record["step"]), ".3f")
            lines.append({"step": str(record["step"]), "training loss": loss, **drafts})
        note = (
            "how often the target's token is the drafter's first one, along training texts / "
            "held-out texts"
        )
        tables.append(TextTable.of(f"Accuracy in training, {folder}", lines, note))
    return tables
