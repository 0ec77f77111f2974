"""Energy by macOS's `powermetrics`, which only root may run; elsewhere there is none."""

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
"""Five samples a second of CPU, GPU and Neural Engine together, each line at once."""

_ELAPSED = re.compile(r"\(([\d.]+)ms elapsed\)")
_POWER = re.compile(r"Combined Power[^:]*:\s*([\d.]+)\s*mW")
_LAST = 0.3
"""Seconds until a sample has covered all that was measured."""

_PATIENCE = 10.0
"""Seconds that the first sample may take."""


class Sample(NamedTuple):
    """Mean power between two moments, seconds since 1970."""

    begin: float
    end: float
    watts: float


class PowerMeter:
    """Samples of the chip's power, from a thread that reads what the program prints.

    first:   set with the first sample, or where there will be none
    stopped: set to read no more
    """

    def __init__(self, printed: IO[str]) -> None:
        self.samples: list[Sample] = []
        self.first, self.stopped = threading.Event(), threading.Event()
        self._printed = printed
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def stop(self) -> None:
        """Close what the program prints into, which ends a program that may not be signalled."""
        self.stopped.set()
        self._reader.join(_PATIENCE)

    def _read(self) -> None:
        with self._printed:
            self._read_samples()
        self.first.set()

    def _read_samples(self) -> None:
        elapsed = 0.0
        for line in self._printed:
            if self.stopped.is_set():
                return
            if (found := _ELAPSED.search(line)) is not None:
                elapsed = float(found[1]) / 1e3
            elif (found := _POWER.search(line)) is not None and elapsed > 0:
                now = time.time()
                self.samples.append(Sample(now - elapsed, now, float(found[1]) / 1e3))
                self.first.set()

    def joules(self, begin: float, end: float) -> float | None:
        """Energy between two moments; None unless samples cover nearly all of the time."""
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
    """Within, power is sampled.

    Raises BadInputError where the program is missing or may not be run.
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
        with contextlib.suppress(PermissionError):  # root's
            process.terminate()
        meter.stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE)
