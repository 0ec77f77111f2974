"""What is known about one setup, in one file: measured costs, and what answers have taught.

A file holds a hash of its content, so that what was damaged or edited counts as nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import get_args

from redrafter_mlx.config import AcceptMethod
from redrafter_mlx.runtime.files.atomic_write import write_private_text
from redrafter_mlx.runtime.files.paths import cache_dir
from redrafter_mlx.tuning.acceptance import AcceptanceStatistics
from redrafter_mlx.tuning.corrections import Corrections
from redrafter_mlx.tuning.cost import CostModel, Setup


@dataclass
class Record:
    """What is known about one setup.

    costs:       measured costs; None if there are none
    corrections: by how much steps differ from what these costs predict
    acceptance:  statistics by acceptance method
    """

    costs: CostModel | None = None
    corrections: Corrections = field(default_factory=Corrections)
    acceptance: dict[AcceptMethod, AcceptanceStatistics] = field(default_factory=dict)


def record_file(setup: Setup) -> Path:
    """Return the path of a setup's record; the file may not exist."""
    return cache_dir() / "tuning" / f"{setup.key}.json"


def save_record(setup: Setup, record: Record, values: str, *, measured: bool = False) -> bool:
    """Save a record; return whether the cache can be written.

    values:   hash of the target's and the drafter's values: another drafter of the same form is
              accepted at other rates
    measured: whether its costs were just measured; others leave those of the file as they are
    """
    there = saved_record(setup, values)
    if not measured and there.costs != record.costs:
        record = replace(record, costs=there.costs, corrections=there.corrections)
    content = {
        "setup": asdict(setup),
        "costs": record.costs and asdict(record.costs),
        "corrections": record.corrections.to_record(),
        "values": values,
        "acceptance": {method: known.to_record() for method, known in record.acceptance.items()},
    }
    text = json.dumps({"sha256": _hash(content), **content})
    with contextlib.suppress(OSError):
        write_private_text(record_file(setup), text, durable=False)
        return True
    return False


def saved_record(setup: Setup, values: str) -> Record:
    """Load what is known about a setup; whatever is missing or damaged counts as nothing.

    values: as in `save_record`; acceptance statistics of others are left out
    """
    found = Record()
    with contextlib.suppress(Exception):  # a damaged file may hold anything
        stored = json.loads(record_file(setup).read_text(encoding="utf-8"))
        if stored.pop("sha256") != _hash(stored) or stored["setup"] != asdict(setup):
            return found
        costs = stored["costs"] and CostModel.from_record(setup, stored["costs"])
        found = Record(costs, Corrections.from_record(stored["corrections"]))
        if stored["values"] == values:
            found.acceptance = {
                method: AcceptanceStatistics.from_record(stored["acceptance"][method])
                for method in get_args(AcceptMethod)
                if method in stored["acceptance"]
            }
    return found


def _hash(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
