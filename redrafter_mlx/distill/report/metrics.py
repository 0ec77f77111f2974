"""The log of a training run: `metrics.jsonl`, one JSON object for each event, in order.

    {"event": "step", "step": 7, "steps": 900, "loss": 5.1, "learning_rate": 1e-4,
     "positions_per_second": 830.0, "seconds": 61.2}
    {"event": "evaluation", "step": 90, "top1": [0.3, ...], "top5": [0.5, ...],
     "tokens_per_step": {"1": 1.4, ...}, "accepted": {"1": [0.3, ...], ...},
     "candidates_only": {"1": 1.4, ...}, "best": true, "seconds": 402.0}

`seconds` is time spent in training, the run's earlier parts included. A number that is not
finite, such as the loss of a run that diverged, is null.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from redrafter_mlx.distill.evaluation.acceptance import DraftQuality
from redrafter_mlx.distill.training.trainer import Evaluation, Event, Step
from redrafter_mlx.errors import DamagedFileError
from redrafter_mlx.runtime.atomic_write import atomic_write, name_in_errors

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Logged:
    """An event, and the seconds of training that had passed at it."""

    event: Event
    seconds: float


class MetricsLog:
    """The log in a run's folder, open for more events.

    Each event is one write, so that a killed process loses none that it wrote. A power cut may
    lose the latest, back to the last evaluation; the checkpoint does not need them.
    """

    def __init__(self, folder: Path, steps_made: int = 0) -> None:
        """Continue the log of a run whose checkpoint holds `steps_made` steps, 0 for a new run.

        Later steps in the log are dropped: they will be made again.
        Raises DamagedFileError for a log that is not one of ours.
        """
        self.path = folder / METRICS
        kept = [at for at in read_metrics(folder) if at.event.step <= steps_made > 0]
        with atomic_write(self.path) as partial:
            partial.write_bytes(b"".join(map(_to_line, kept)))
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        self._began = time.monotonic() - (kept[-1].seconds if kept else 0.0)

    def append(self, event: Event) -> None:
        """Write one event."""
        line = _to_line(Logged(event, time.monotonic() - self._began))
        rest = memoryview(line)
        with name_in_errors(self.path):
            while rest:
                rest = rest[os.write(self._file, rest) :]
            if isinstance(event, Evaluation):
                os.fsync(self._file)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)


def read_metrics(folder: Path) -> list[Logged]:
    """The events of a run so far, in order; a half-written last line is left out.

    Raises DamagedFileError naming the line that is not one of ours.
    """
    path = folder / METRICS
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    found: list[Logged] = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            if number == len(lines):
                break  # after the last line's end: nothing, or what a power cut left
            record = None
        try:
            found.append(_read_event(record))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedFileError(
                f"{path}: line {number} is no event of a training run; move the file away, and a "
                f"new one is begun"
            ) from error
    return found


def _to_line(logged: Logged) -> bytes:
    event = logged.event
    if isinstance(event, Step):
        record = {"event": "step", **asdict(event)}
    else:
        quality = asdict(event.quality)
        record = {"event": "evaluation", "step": event.step, **quality, "best": event.best}
    record["seconds"] = round(logged.seconds, 3)
    return json.dumps(_without_nan(record), allow_nan=False).encode() + b"\n"


def _read_event(record: dict[str, Any]) -> Logged:
    """Raises ValueError, KeyError, TypeError or AttributeError for what `_to_line` never wrote."""
    kind, seconds = record.pop("event"), float(record.pop("seconds"))
    if kind == "step":
        step, steps = int(record.pop("step")), int(record.pop("steps"))
        rates = {name: _number(value) for name, value in record.items()}
        return Logged(Step(step, steps, **rates), seconds)
    if kind != "evaluation":
        raise ValueError(kind)
    quality = DraftQuality(
        top1=_numbers(record["top1"]),
        top5=_numbers(record["top5"]),
        tokens_per_step={int(w): _number(x) for w, x in record["tokens_per_step"].items()},
        accepted={int(w): _numbers(x) for w, x in record["accepted"].items()},
        candidates_only={int(w): _number(x) for w, x in record["candidates_only"].items()},
    )
    return Logged(Evaluation(int(record["step"]), quality, bool(record["best"])), seconds)


def _without_nan(value: object) -> object:
    """The same with None for numbers that are not finite, which JSON cannot hold."""
    if isinstance(value, dict):
        return {key: _without_nan(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(held) for held in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _numbers(values: Iterable[float | None]) -> tuple[float, ...]:
    return tuple(map(_number, values))
