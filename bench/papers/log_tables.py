"""Tables of the papers that are read from the logs of training runs."""

from __future__ import annotations

from redrafter_mlx.bench.papers.evidence import Evidence
from redrafter_mlx.bench.papers.published import Published
from redrafter_mlx.bench.show.tables import TextTable


def accuracy_tables(evidence: Evidence, published: Published) -> list[TextTable]:
    """Accuracy on held-out texts by the draft's position, at each evaluation of each run."""
    del published
    tables = []
    for folder, log in evidence.logs.items():
        evaluations = [record for record in log if record["event"] == "evaluation"]
        losses = {record["step"]: record["loss"] for record in log if record["event"] == "step"}
        drafts = max((len(record["top1"]) for record in evaluations), default=0)
        rows = []
        for record in evaluations:
            loss = losses.get(record["step"])
            shares = [
                f"{one:.1%} / {five:.1%}"
                for one, five in zip(record["top1"], record["top5"], strict=True)
            ]
            rows.append((str(record["step"]), "" if loss is None else f"{loss:.3f}", *shares))
        tables.append(
            TextTable(
                f"Accuracy in training, {folder}",
                ("step", "training loss", *(f"draft {n}" for n in range(1, drafts + 1))),
                tuple(rows),
                "on held-out texts: the target's token is the drafter's first / among its first "
                "five; of training texts the loss alone is logged",
            )
        )
    return tables
