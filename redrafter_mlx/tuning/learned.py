"""What answers have taught, on disk: a process starts with what earlier processes learned."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from redrafter_mlx.config import AcceptMethod
from redrafter_mlx.runtime.atomic_write import write_private_text
from redrafter_mlx.runtime.paths import cache_dir
from redrafter_mlx.tuning.acceptance import AcceptanceStatistics
from redrafter_mlx.tuning.step_times import StepTimes
from redrafter_mlx.tuning.timings import Setup


@dataclass
class Learned:
    """What answers have taught about one model and drafter.

    acceptance: statistics by acceptance method
    times:      by how much steps differ from the cost model, since the costs were measured
    saved:      seconds of the probe budget; infinite before anything was saved or paid
    """

    acceptance: dict[AcceptMethod, AcceptanceStatistics] = field(default_factory=dict)
    times: StepTimes = field(default_factory=StepTimes)
    saved: float = math.inf


def learned_file(setup: Setup, values: str) -> Path:
    """Return the path of what was learned on a setup; the file may not exist.

    values: hash of the target's and the drafter's values: another drafter of the same form is
            accepted at other rates
    """
    return cache_dir() / "acceptance" / f"{setup.path.stem}-{values}.json"


def save_learned(path: Path, learned: Learned, costs: str) -> None:
    """Save it for other processes; a cache that cannot be written is no error.

    costs: key of the timings that the step times correct, and whose unit the budget has
    """
    record: dict[str, object] = {k: known.to_record() for k, known in learned.acceptance.items()}
    record["times"] = {"costs": costs, **learned.times.to_record()}
    if math.isfinite(learned.saved):
        record["saved"] = learned.saved
    with contextlib.suppress(OSError):
        write_private_text(path, json.dumps(record), durable=False)


def saved_learned(path: Path, costs: str) -> Learned:
    """Load what was learned; nothing if the file is missing or damaged.

    costs: key of the timings in use; corrections of others are left out
    """
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        methods = [method for method in get_args(AcceptMethod) if method in stored]
        known = {method: AcceptanceStatistics.from_record(stored[method]) for method in methods}
        times = stored.get("times", {})
        if times.get("costs") != costs:
            return Learned(known)
        saved = float(stored.get("saved", math.inf))
        if math.isnan(saved):
            raise ValueError("the budget is no number")
        return Learned(known, StepTimes.from_record(times), saved)
    except Exception:  # a damaged file may hold anything
        return Learned()
