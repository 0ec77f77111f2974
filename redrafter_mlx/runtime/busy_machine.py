"""Whether a machine was busy with other work while something was measured on it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from redrafter_mlx.runtime.processes.launched import launched_rank

STATISTICS = Path("/proc/stat")

_STOLEN = 0.05
"""Share of stolen time above which measurements say more about the host than about this project."""

_GOT, _OTHERS = 0.75, 0.2
"""What makes a machine busy: a computing process that gets less than this share of one processor,
or other processes that use more than this share of all. A quiet machine gives it at least one."""


class _Time(NamedTuple):
    """Seconds since some moment.

    clock:  by the clock
    own:    of all processors, used by this process
    used:   the same by all processes and the kernel; 0 where it is unknown
    stolen: those that a virtual machine wanted and its host gave to others: "steal" in `top`
    """

    clock: float
    own: float
    used: float
    stolen: float

    @classmethod
    def now(cls) -> _Time:
        used = stolen = 0.0
        with contextlib.suppress(OSError, ValueError):
            _, user, nice, system, _, _, irq, softirq, taken, *_ = (
                STATISTICS.read_text(encoding="ascii").partition("\n")[0].split()
            )
            tick = os.sysconf("SC_CLK_TCK")
            used = sum(map(int, (user, nice, system, irq, softirq))) / tick
            stolen = int(taken) / tick
        return cls(time.perf_counter(), time.process_time(), used, stolen)


class BusyMachine:
    """Compares the processor time that measurements got with the clock.

    computes: whether this process computes all the time, as it does on a CPU; where a GPU does, it
              waits
    shared:   whether other processes on this machine belong to the measurement
    """

    def __init__(self, *, computes: bool, shared: bool = False) -> None:
        self._computes, self._shared = computes, shared
        self._clock = self._own = self._used = self._stolen = 0.0

    @classmethod
    def here(cls) -> BusyMachine:
        """Return one for what this process computes, with other ranks where it was launched."""
        from redrafter_mlx.runtime.device import backend  # imports MLX, which help does without

        return cls(computes=backend() == "cpu", shared=launched_rank() is not None)

    def rest(self, seconds: float) -> None:
        """Sleep; nothing is to be computed meanwhile."""
        time.sleep(seconds)
        self._clock -= seconds

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Add the time of the block; an error in it changes nothing."""
        began = _Time.now()
        try:
            yield
        finally:
            clock, own, used, stolen = (a - b for a, b in zip(_Time.now(), began, strict=True))
            self._clock, self._own = self._clock + clock, self._own + own
            self._used, self._stolen = self._used + used, self._stolen + stolen

    def notes(self) -> list[str]:
        """Return what must be said with the figures; nothing if the machine was quiet."""
        found = []
        if self._stolen > _STOLEN * (self._used + self._stolen):
            found.append(
                f"this virtual machine's host gave {self._stolen / (self._used + self._stolen):.0%}"
                f" of the processor time to others meanwhile; measure again when it is quiet"
            )
        if self._clock <= 0 or self._shared:
            return found
        cores, others = os.cpu_count() or 1, (self._used - self._own) / self._clock
        starved = self._computes and self._own < _GOT * self._clock
        if starved or others > _OTHERS * cores:
            had = f", and others had {others:.1f}" if others > 0 else ""
            found.append(
                f"the machine was busy: this process got {self._own / self._clock:.0%} of a core"
                f"{had}, of {cores}; the figures are unreliable, measure again when it is quiet"
            )
        return found
