"""Processor time that a virtual machine wanted and its host gave to others: "steal" in `top`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

_STATISTICS = Path("/proc/stat")

_MUCH = 0.05
"""Share of stolen time above which measurements say more about the host than about this project."""


class ProcessorTime(NamedTuple):
    """Time of all processors since the start, in the kernel's ticks; zeros where it is unknown.

    used:   by processes and by the kernel
    stolen: by others on the host
    """

    used: int
    stolen: int

    @classmethod
    def now(cls) -> ProcessorTime:
        with contextlib.suppress(OSError, ValueError):
            _, user, nice, system, _, _, irq, softirq, stolen, *_ = (
                _STATISTICS.read_text(encoding="ascii").partition("\n")[0].split()
            )
            return cls(sum(map(int, (user, nice, system, irq, softirq))), int(stolen))
        return cls(0, 0)

    def note(self) -> str | None:
        """Return what a measurement that began at this time should say; None if it was quiet."""
        used, stolen = (a - b for a, b in zip(ProcessorTime.now(), self, strict=True))
        if stolen <= _MUCH * (used + stolen):
            return None
        return (
            f"this virtual machine's host gave {stolen / (used + stolen):.0%} of the processor "
            f"time to others meanwhile; measure again when it is quiet"
        )
