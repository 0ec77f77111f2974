"""Energy measured with `powermetrics`, which exists only on macOS and which only root may run."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import IO, NamedTuple

from redrafter_mlx.errors import BadInputError

_PROGRAM = "powermetrics"
_ARGUMENTS = ("--samplers", "cpu_power", "-i", "200", "-b", "1")
"""Five samples per second of CPU, GPU and Neural Engine together; output is line-buffered."""

_ELAPSED = re.compile(r"\(([\d.]+)ms elapsed\)")
_POWER = re.compile(r"Combined Power[^:]*:\s*([\d.]+)\s*mW")
_LAST = 0.3
"""Seconds to wait after measuring, so that the last sample covers its end."""

_PATIENCE = 10.0
"""Maximum number of seconds to wait for the first sample, and for the program to end."""


class Sample(NamedTuple):
    """Mean power between two moments, seconds since 1970."""

    begin: float
    end: float
    watts: float


class PowerMeter:
    """Samples of the chip's power, read by a thread from the program's output.

    first:   set with the first sample, or when the output ends
    stopped: set to stop reading
    """

    def __init__(self, printed: IO[str]) -> None:
        self.samples: list[Sample] = []
        self.first, self.stopped = threading.Event(), threading.Event()
        self._printed = printed
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def stop(self) -> None:
        """Close the program's output, which ends the program even if it may not be signalled."""
        self.stopped.set()
        self._reader.join(_PATIENCE)

    def _read(self) -> None:
        elapsed = 0.0
        with self._printed:
            for line in self._printed:
                if self.stopped.is_set():
                    break
                if (found := _ELAPSED.search(line)) is not None:
                    elapsed = float(found[1]) / 1e3
                elif (found := _POWER.search(line)) is not None and elapsed > 0:
                    now = time.time()
                    self.samples.append(Sample(now - elapsed, now, float(found[1]) / 1e3))
                    self.first.set()
        self.first.set()

    def joules(self, begin: float, end: float) -> float | None:
        """Return the energy between two moments; None unless samples cover over 80% of the time."""
        covered = energy = 0.0
        for sample in self.samples:
            seconds = min(end, sample.end) - max(begin, sample.begin)
            if seconds > 0:
                covered += seconds
                energy += seconds * sample.watts
        whole = end - begin
        return energy * whole / covered if whole > 0 and covered > 0.8 * whole else None


@contextlib.contextmanager
def power_meter() -> Iterator[PowerMeter]:
    """Sample the power within the context.

    Raises BadInputError if the program is missing or may not be run.
    """
    program = shutil.which(_PROGRAM)
    if program is None:
        raise BadInputError(f"--energy needs macOS's {_PROGRAM}, which is not here; leave it out")
    sudo = () if os.geteuid() == 0 else ("sudo", "-n")
    process = subprocess.Popen(
        [*sudo, program, *_ARGUMENTS],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    meter = PowerMeter(process.stdout)
    try:
        meter.first.wait(_PATIENCE)
        if not meter.samples:
            raise BadInputError(
                f"--energy needs {_PROGRAM}, which only root may run; allow it first with: sudo -v"
            )
        yield meter
        time.sleep(_LAST)
    finally:
        with contextlib.suppress(PermissionError):  # root owns the process
            process.terminate()
        meter.stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE)
