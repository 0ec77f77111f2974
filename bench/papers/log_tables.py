"""Tables of the papers that are made from the logs of training runs."""

from __future__ import annotations

from redrafter_mlx.bench.papers.evidence import Evidence
from redrafter_mlx.bench.show.tables import TextTable


def accuracy_tables(evidence: Evidence) -> list[TextTable]:
    """Tabulate accuracy by the draft's position, at each evaluation of each run."""
    tables = []
    for folder, log in evidence.logs.items():
        evaluations = [record for record in log if record["event"] == "evaluation"]
        losses = {record["step"]: record["loss"] for record in log if record["event"] == "step"}
        drafts = max((len(record["top1"]) for record in evaluations), default=0)
        rows = []
        for record in evaluations:
            loss = losses.get(record["step"])
            seen = [*record.get("training_top1", ()), *([None] * drafts)]
            shares = [
                f"{_share(training)} / {one:.1%}"
                for training, one in zip(seen, record["top1"], strict=False)
            ]
            rows.append((str(record["step"]), "" if loss is None else f"{loss:.3f}", *shares))
        tables.append(
            TextTable(
                f"Accuracy in training, {folder}",
                ("step", "training loss", *(f"draft {n}" for n in range(1, drafts + 1))),
                tuple(rows),
                "how often the target's token is the drafter's first one, along training texts / "
                "held-out texts",
            )
        )
    return tables


def _share(value: float | None) -> str:
    return "not logged" if value is None else f"{value:.1%}"
