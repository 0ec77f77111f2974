"""What is known about one setup, in one file: measured times, and what answers have taught."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from redrafter_mlx.config import AcceptMethod
from redrafter_mlx.runtime.atomic_write import write_private_text
from redrafter_mlx.runtime.paths import cache_dir
from redrafter_mlx.tuning.acceptance import AcceptanceStatistics
from redrafter_mlx.tuning.corrections import Corrections
from redrafter_mlx.tuning.timings import SHORT_CONTEXT, Case, Setup, Timings


@dataclass
class Record:
    """What is known about one setup.

    timings:     measured times; empty if there are none
    corrections: by how much steps differ from what these times predict
    acceptance:  statistics by acceptance method
    """

    timings: Timings
    corrections: Corrections = field(default_factory=Corrections)
    acceptance: dict[AcceptMethod, AcceptanceStatistics] = field(default_factory=dict)


def record_file(setup: Setup) -> Path:
    """Return the path of a setup's record; the file may not exist."""
    return cache_dir() / "tuning" / f"{setup.key}.json"


def save_record(record: Record, values: str, *, measured: bool = False) -> bool:
    """Save a record; return whether the cache can be written.

    values:   hash of the target's and the drafter's values: another drafter of the same form is
              accepted at other rates
    measured: whether its times were just measured; others leave those of the file as they are
    """
    there = saved_record(record.timings.setup, values)
    if not measured and there.timings.key != record.timings.key:
        record = replace(record, timings=there.timings, corrections=there.corrections)
    content = {
        "setup": asdict(record.timings.setup),
        "seconds": [[*case, seconds] for case, seconds in record.timings.seconds.items()],
        "spread": record.timings.spread,
        "corrections": record.corrections.to_record(),
        "values": values,
        "acceptance": {method: known.to_record() for method, known in record.acceptance.items()},
    }
    with contextlib.suppress(OSError):
        write_private_text(record_file(record.timings.setup), json.dumps(content), durable=False)
        return True
    return False


def saved_record(setup: Setup, values: str) -> Record:
    """Load what is known about a setup; whatever is missing or damaged counts as nothing.

    values: as in `save_record`; acceptance statistics of others are left out
    """
    found = Record(Timings(setup))
    with contextlib.suppress(Exception):  # a damaged file may hold anything
        stored = json.loads(record_file(setup).read_text(encoding="utf-8"))
        if Setup(**stored["setup"]) != setup:
            return found
        with contextlib.suppress(Exception):
            found.timings = _timings(setup, stored)
            found.corrections = Corrections.from_record(stored["corrections"])
        if stored["values"] == values:
            found.acceptance = {
                method: AcceptanceStatistics.from_record(stored["acceptance"][method])
                for method in get_args(AcceptMethod)
                if method in stored["acceptance"]
            }
    return found


def _timings(setup: Setup, stored: Mapping[str, Any]) -> Timings:
    """Read times; raises ValueError, TypeError or KeyError for what cannot have been measured."""
    seconds: dict[Case, float] = {
        (kind, int(a), int(b)): float(s) for kind, a, b, s in stored["seconds"]
    }
    found = Timings(setup, seconds, float(stored["spread"]))
    if not seconds:
        return found
    call = seconds["call", 1, SHORT_CONTEXT]
    least = {"call": 1e-9, "draft": 0.0, "overhead": -call / 2}
    shortest = {"call": 1, "draft": 2, "overhead": 1}
    for (kind, a, b), s in seconds.items():
        if not (least[kind] <= s < math.inf and a >= 1 and b >= shortest[kind]):
            raise ValueError(f"{kind} {a} {b} cannot take {s} seconds")
    if not 0 <= found.spread < math.inf:
        raise ValueError(f"the spread cannot be {found.spread}")
    return found
