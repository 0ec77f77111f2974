"""Acceptance statistics on disk: a process starts with what earlier processes learned."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from redrafter_mlx.autotune.acceptance import AcceptanceStatistics
from redrafter_mlx.autotune.cost_model import Setup
from redrafter_mlx.config import AcceptMethod
from redrafter_mlx.runtime.atomic_write import write_private_text
from redrafter_mlx.runtime.paths import cache_dir

Learned = dict[AcceptMethod, AcceptanceStatistics]


def learned_file(setup: Setup, values: str) -> Path:
    """Return the path of what was learned on a setup; the file may not exist.

    values: hash of the target's and the drafter's values: another drafter of the same form is
            accepted at other rates
    """
    return cache_dir() / "acceptance" / f"{setup.path.stem}-{values}.json"


def save_learned(path: Path, learned: Mapping[AcceptMethod, AcceptanceStatistics]) -> None:
    """Save statistics for other processes; a cache that cannot be written is no error."""
    record = {method: known.to_record() for method, known in learned.items()}
    with contextlib.suppress(OSError):
        write_private_text(path, json.dumps(record), durable=False)


def saved_learned(path: Path) -> Learned:
    """Load what was learned; nothing if the file is missing or damaged."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        known = [method for method in get_args(AcceptMethod) if method in stored]
        return {method: AcceptanceStatistics.from_record(stored[method]) for method in known}
    except Exception:  # a damaged file may hold anything
        return {}
