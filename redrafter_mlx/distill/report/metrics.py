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
from redrafter_mlx.runtime.atomic_write import naming, whole_file

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

        What the log says of later steps is dropped: they will be made again.
        Raises DamagedFileError for a log that is not one of ours.
        """
        self.path = folder / METRICS
        lines = _lines(self.path)
        kept = [(line, at) for line, at in lines if at.event.step <= steps_made > 0]
        text = b"".join(line for line, _ in kept)
        if not self.path.exists() or text != self.path.read_bytes():
            with whole_file(self.path) as partial:
                partial.write_bytes(text)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        self._began = time.monotonic() - (kept[-1][1].seconds if kept else 0.0)

    def append(self, event: Event) -> None:
        """Write one event."""
        line = _to_line(Logged(event, time.monotonic() - self._began))
        rest = memoryview(line)
        with naming(self.path):
            while rest:
                rest = rest[os.write(self._file, rest) :]
            if isinstance(event, Evaluation):
                os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(folder: Path) -> list[Logged]:
    """The events of a run so far, in order; a half-written last line is left out.

    Raises DamagedFileError naming the line that is not one of ours.
    """
    return [logged for _, logged in _lines(folder / METRICS)]


def _lines(path: Path) -> list[tuple[bytes, Logged]]:
    """Each whole line with its end, and what it says; none where there is no file."""
    try:
        raw = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    found = []
    for number, line in enumerate(raw, 1):
        try:
            said = json.loads(line)
        except ValueError as error:
            if number == len(raw):
                break  # behind the last line's end: nothing, or what a power cut left
            raise _not_ours(path, number) from error
        try:
            found.append((line + b"\n", _read_event(said)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _not_ours(path, number) from error
    return found


def _not_ours(path: Path, line: int) -> DamagedFileError:
    return DamagedFileError(
        f"{path}: line {line} is no event of a training run; move the file away, and a new one "
        f"is begun"
    )


def _to_line(logged: Logged) -> bytes:
    event = logged.event
    if isinstance(event, Step):
        said = {"event": "step", **asdict(event)}
    else:
        quality = asdict(event.quality)
        said = {"event": "evaluation", "step": event.step, **quality, "best": event.best}
    said["seconds"] = round(logged.seconds, 3)
    return json.dumps(_without_nan(said), allow_nan=False).encode() + b"\n"


def _read_event(said: dict[str, Any]) -> Logged:
    """Raises ValueError, KeyError, TypeError or AttributeError for what `_to_line` never wrote."""
    kind, seconds = said.pop("event"), float(said.pop("seconds"))
    if kind == "step":
        step, steps = int(said.pop("step")), int(said.pop("steps"))
        rates = {name: _number(value) for name, value in said.items()}
        return Logged(Step(step, steps, **rates), seconds)
    if kind != "evaluation":
        raise ValueError(kind)
    quality = DraftQuality(
        top1=_numbers(said["top1"]),
        top5=_numbers(said["top5"]),
        tokens_per_step={int(w): _number(x) for w, x in said["tokens_per_step"].items()},
        accepted={int(w): _numbers(x) for w, x in said["accepted"].items()},
        candidates_only={int(w): _number(x) for w, x in said["candidates_only"].items()},
    )
    return Logged(Evaluation(int(said["step"]), quality, bool(said["best"])), seconds)


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
