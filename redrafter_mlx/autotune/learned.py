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
from redrafter_mlx.errors import RedrafterError
from redrafter_mlx.runtime.atomic_write import write_private_text
from redrafter_mlx.runtime.paths import cache_dir

Learned = dict[AcceptMethod, AcceptanceStatistics]


def save_learned(setup: Setup, learned: Mapping[AcceptMethod, AcceptanceStatistics]) -> None:
    """Save statistics for other processes; a cache that cannot be written is no error."""
    record = {method: known.to_record() for method, known in learned.items()}
    with contextlib.suppress(OSError):
        write_private_text(_path(setup), json.dumps(record))


def saved_learned(setup: Setup) -> Learned:
    """Load what was learned on this setup; nothing if the file is missing or damaged."""
    try:
        stored = json.loads(_path(setup).read_text(encoding="utf-8"))
        known = [method for method in get_args(AcceptMethod) if method in stored]
        return {method: AcceptanceStatistics.from_record(stored[method]) for method in known}
    except (OSError, RedrafterError, ValueError, TypeError, KeyError, RecursionError):
        return {}


def _path(setup: Setup) -> Path:
    return cache_dir() / "acceptance" / setup.path.name
