"""What answers have taught, on disk: a process starts with what earlier processes learned."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from redrafter_mlx.autotune.acceptance import AcceptanceStatistics
from redrafter_mlx.autotune.cost_model import Setup
from redrafter_mlx.autotune.step_times import StepTimes
from redrafter_mlx.config import AcceptMethod
from redrafter_mlx.errors import RedrafterError
from redrafter_mlx.runtime.atomic_write import write_private_text
from redrafter_mlx.runtime.paths import cache_dir


@dataclass
class Learned:
    """Acceptance statistics of each acceptance method, and measured step times."""

    acceptance: dict[AcceptMethod, AcceptanceStatistics] = field(default_factory=dict)
    times: StepTimes = field(default_factory=StepTimes)


def save_learned(setup: Setup, learned: Learned) -> None:
    """Save it for other processes; a cache that cannot be written is no error."""
    acceptance = {method: known.to_record() for method, known in learned.acceptance.items()}
    record = {"acceptance": acceptance, "times": learned.times.to_record()}
    with contextlib.suppress(OSError):
        write_private_text(_path(setup), json.dumps(record))


def saved_learned(setup: Setup) -> Learned:
    """Load what was learned on this setup; nothing if the file is missing or damaged."""
    try:
        stored = json.loads(_path(setup).read_text(encoding="utf-8"))
        acceptance, times = stored["acceptance"], StepTimes.from_record(stored["times"])
        known = [method for method in get_args(AcceptMethod) if method in acceptance]
        read = {method: AcceptanceStatistics.from_record(acceptance[method]) for method in known}
    except (OSError, RedrafterError, ValueError, TypeError, KeyError, RecursionError):
        return Learned()
    return Learned(read, times)


def _path(setup: Setup) -> Path:
    return cache_dir() / "learned" / setup.path.name
