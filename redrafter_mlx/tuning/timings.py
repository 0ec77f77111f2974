"""Measured times of the target's calls and the drafting, and the setup that they hold for."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from redrafter_mlx.cpu.blas import BLAS
from redrafter_mlx.runtime.atomic_write import write_private_text
from redrafter_mlx.runtime.device import chip_name, dtype_name, system_name
from redrafter_mlx.runtime.launched import launch_name
from redrafter_mlx.runtime.paths import cache_dir
from redrafter_mlx.target_model.fingerprint import shapes_hash
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.version import __version__

SHORT_CONTEXT, LONG_CONTEXT = 128, 2048
"""Committed tokens at which calls are timed; attention is linear between and beyond them."""

Case = tuple[str, int, int]
"""What is timed: ("call", query rows, context), ("draft", B * W, L) or ("overhead", W, L)."""


@dataclass(frozen=True)
class Setup:
    """The models and the machine that were measured; times are reused only if all fields are equal.

    chip:    the device's name
    model:   fingerprint of the target's tensors: names, shapes and types
    drafter: the same of the drafter, or its kind if it has no tensors
    dtype:   type of the target's hidden states
    mlx:     MLX's version
    others:  the system, and the versions of mlx-lm and this package
    blas:    the library of matrix products on a CPU
    launch:  how ranks share the target, see `launch_name`
    """

    chip: str
    model: str
    drafter: str
    dtype: str
    mlx: str
    blas: str
    launch: str = ""
    others: str = ""

    @property
    def path(self) -> Path:
        """The file that holds its times."""
        key = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return cache_dir() / "costs" / f"{key[:32]}.json"


def setup_of(model: nn.Module, target: Target, drafter: str) -> Setup:
    """Return the setup that times hold for; `drafter` is equal for drafters with equal times."""
    return Setup(
        chip=f"{mx.default_device().type.name} {chip_name()}",
        model=f"{target.model_type} {shapes_hash(model)}",
        drafter=drafter,
        dtype=dtype_name(target.dtype),
        mlx=metadata.version("mlx"),
        blas=BLAS.library or BLAS.note,
        launch=launch_name(),
        others=f"{system_name()}, mlx-lm {metadata.version('mlx-lm')}, {__version__}",
    )


@dataclass
class Timings:
    """Times measured on one setup.

    seconds:  measured seconds, by case
    taken:    number of measurements of a case after answers
    spread:   typical relative difference of two measurements of one case
    complete: whether everything was measured together, so that nothing needs to be assumed
    budget:   seconds that may be spent on further measurements
    """

    setup: Setup
    seconds: dict[Case, float] = field(default_factory=dict)
    taken: dict[Case, int] = field(default_factory=dict)
    spread: float = 0.0
    complete: bool = False
    budget: float = 0.0

    @property
    def key(self) -> str:
        """The same for the same measured seconds: corrections of others say nothing about these."""
        return hashlib.sha256(repr(sorted(self.seconds.items())).encode()).hexdigest()[:16]

    def save(self) -> bool:
        """Save them in place of all others; whether the cache can be written."""
        record = asdict(self)
        for name in ("seconds", "taken"):
            record[name] = [[*case, value] for case, value in getattr(self, name).items()]
        with contextlib.suppress(OSError):
            write_private_text(self.setup.path, json.dumps(record), durable=False)
            return True
        return False

    def add_to_saved(self) -> None:
        """Save them beside those of other processes, the shortest of each case.

        An overhead belongs to the one-row call that it was measured beside.
        """
        there, one_row = saved_timings(self.setup), ("call", 1, SHORT_CONTEXT)
        if there.complete and not self.complete:
            return
        if there.complete == self.complete:
            mine, theirs = self.seconds, there.seconds
            quicker = min(mine, theirs, key=lambda of: of.get(one_row, math.inf))
            overheads = {c: s for c, s in (mine | theirs | quicker).items() if c[0] == "overhead"}
            for case, seconds in theirs.items():
                mine[case] = min(seconds, mine.get(case, seconds))
            mine |= overheads
            raise_overheads(mine)
            self.taken = there.taken | self.taken
        self.save()


def raise_overheads(seconds: dict[Case, float]) -> None:
    """Raise the overheads to the least that can be: half a one-row call less than nothing."""
    call = seconds.get(("call", 1, SHORT_CONTEXT), math.inf)
    for case in [case for case in seconds if case[0] == "overhead"]:
        seconds[case] = max(seconds[case], -call / 2)


def saved_timings(setup: Setup) -> Timings:
    """Load the times measured on this setup; no times if the file is missing or damaged."""
    try:
        stored = json.loads(setup.path.read_text(encoding="utf-8"))
        seconds = {(str(k), int(a), int(b)): float(s) for k, a, b, s in stored.pop("seconds")}
        taken = {(str(k), int(a), int(b)): int(n) for k, a, b, n in stored.pop("taken")}
        given = {"setup": Setup(**stored["setup"]), "seconds": seconds, "taken": taken}
        found = Timings(**{**stored, **given})
        call = seconds.get(("call", 1, SHORT_CONTEXT), 0.0)
        least = {"call": 1e-9, "draft": 1e-9, "overhead": -call / 2}
        usable = all(least[kind] <= s < math.inf for (kind, *_), s in seconds.items())
        shortest = {"call": 1, "draft": 2, "overhead": 1}
        usable = usable and all(a >= 1 and b >= shortest[kind] for kind, a, b in seconds)
        usable = usable and 0 <= found.spread < math.inf and math.isfinite(found.budget)
        usable = usable and (call > 0 or not found.complete)
    except Exception:  # a damaged file may hold anything
        return Timings(setup)
    return found if usable and found.setup == setup else Timings(setup)
