"""The log of a training run: `metrics.jsonl`, one JSON object per event, in order.

    {"event": "step", "step": 7, "steps": 900, "loss": 5.1, "learning_rate": 1e-4,
     "positions_per_second": 830.0, "seconds": 61.2}
    {"event": "evaluation", "step": 90, "top1": [0.3, ...], "top5": [0.5, ...],
     "tokens_per_step": {"1": 1.4, ...}, "accepted": {"1": [0.3, ...], ...},
     "best": true, "training_top1": [0.3, ...], "seconds": 402.0}

`seconds` is the time spent in training, including earlier parts of a resumed run. A loss that is
not finite, because the run diverged, is null.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from redrafter_mlx.distill.corpus.shards import naming_damage
from redrafter_mlx.distill.evaluation.acceptance import DraftQuality
from redrafter_mlx.distill.training.learner import Step
from redrafter_mlx.distill.training.trainer import Evaluation, Event
from redrafter_mlx.errors import DamagedFileError
from redrafter_mlx.runtime.files.atomic_write import atomic_write, name_in_errors

METRICS = "metrics.jsonl"


class MetricsLog:
    """The log in a run's folder, open for more events.

    Each event is one write, so that a killed process loses no event that it wrote. A power cut may
    lose the events after the last evaluation; the checkpoint does not need them.
    """

    def __init__(self, folder: Path, steps_made: int = 0) -> None:
        """Continue the log of a run whose checkpoint holds `steps_made` steps, 0 for a new run.

        Later steps in it are dropped: they will be repeated. Raises DamagedFileError as
        `read_metrics`.
        """
        self.path = folder / METRICS
        kept = [record for record in read_metrics(folder) if record["step"] <= steps_made > 0]
        with atomic_write(self.path) as partial:
            partial.write_text("".join(map(_to_line, kept)), encoding="utf-8")
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        self._began = time.monotonic() - (kept[-1]["seconds"] if kept else 0.0)

    def append(self, event: Event) -> None:
        kind = "step" if isinstance(event, Step) else "evaluation"
        record: dict[str, Any] = {"event": kind, **asdict(event)}
        record |= record.pop("quality", {})
        if not math.isfinite(record.get("loss", 0)):
            record["loss"] = None
        record["seconds"] = round(time.monotonic() - self._began, 3)
        rest = memoryview(_to_line(record).encode())
        with name_in_errors(self.path):
            while rest:
                rest = rest[os.write(self._file, rest) :]
            if isinstance(event, Evaluation):
                os.fsync(self._file)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the events of a run so far, in order, without a half-written last line.

    Raises DamagedFileError naming a line that is not one of ours.
    """
    path = folder / METRICS
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            if number == len(lines):
                break  # after the last line break: nothing, or what a power cut left
            record = None
        if not _is_event(record):
            raise DamagedFileError(
                f"{path}: line {number} is no event of a training run; move the file away, and a "
                f"new one is begun"
            )
        found.append(record)
    return found


def _is_event(record: object) -> bool:
    if not isinstance(record, dict) or "event" not in record:
        return False
    step, seconds = record.get("step"), record.get("seconds")
    return isinstance(step, int) and isinstance(seconds, (int, float)) and math.isfinite(seconds)


def training_seconds(folder: Path) -> float | None:
    """Return the training time of the drafter in a folder; None if the folder holds no log."""
    log = read_metrics(folder)
    return float(log[-1]["seconds"]) if log else None


def best_quality(folder: Path) -> DraftQuality | None:
    """Return the quality of the drafter in a folder; None if its log does not hold it."""
    best = next((record for record in reversed(read_metrics(folder)) if record.get("best")), None)
    if best is None:
        return None
    with naming_damage(folder / METRICS, "move it away"):
        return DraftQuality(
            top1=tuple(best["top1"]),
            top5=tuple(best["top5"]),
            tokens_per_step={int(width): x for width, x in best["tokens_per_step"].items()},
            accepted={int(width): tuple(x) for width, x in best["accepted"].items()},
        )


def _to_line(record: dict[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"
