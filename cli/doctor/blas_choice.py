"""Finds the BLAS that decodes fastest, for a Linux machine that has several.

A process has one BLAS, loaded before MLX, so each library is measured in a separate process. The
criterion is not the speed of matrix products, but the decoding rate that is expected of a usual
drafter by the target's calls of a few rows. Nothing else of these processes is kept.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict

from redrafter_mlx.cli.options import ModelOptions
from redrafter_mlx.cli.progress import progress_bars
from redrafter_mlx.cpu.blas import libraries_here, prefer_library, preferred_library
from redrafter_mlx.errors import BusyError
from redrafter_mlx.runtime.processes.launched import launched_rank
from redrafter_mlx.weights.fetching.resolve import resolve
from redrafter_mlx.weights.text.chat_template import require_chat_template

_CHOSEN = "REDRAFTER_BLAS"

ARGUMENTS = ("-m", "redrafter_mlx.cli.tune.command")
"""Arguments of the Python process that measures."""

BUSY = 75
"""Exit status of such a process where times of the same call differ too much to be kept."""

_CLOSE = 0.75
"""Share of the fastest rate from which a library is measured again: in a busy minute the fastest
may look slower than another one."""

_LONGEST, _MIN, _TIMES = 600.0, 30.0, 3.0
"""Time limit of a measurement: _TIMES times the shortest so far, between _MIN and _LONGEST s."""


def compare_libraries(
    loading: ModelOptions, again: bool, note: Callable[[str], None], chat_or: str | None = None
) -> str | None:
    """Measure each library, prefer the fastest from now on and return it; None if none was chosen.

    A library that the environment names is kept, and so is an earlier choice, unless `again`.
    Those with similar rates are measured twice, and the better one counts. A measurement is
    stopped if it takes several times as long as that of another library. Ranks of `mlx.launch`
    compare nothing, because they would have to restart together. `chat_or` as in `load_target`.
    """
    if sys.platform != "linux" or os.environ.get(_CHOSEN) or launched_rank() is not None:
        return None
    here = libraries_here()
    chosen = preferred_library() in here and not again
    if len(here) < 2 or chosen:
        return None
    from redrafter_mlx.runtime.device import backend

    if backend() != "cpu":
        return None
    with progress_bars("looking for the model") as progress:  # not in each library's process
        local = resolve(loading.model, offline=loading.offline, progress=progress)
    if chat_or is not None:
        require_chat_template(local.path, local.name, chat_or)
    rates: dict[str, float] = {}
    longest = _LONGEST
    for library in _in_turn(here, rates):
        began = time.monotonic()
        try:
            rate = rate_with(library, loading, longest)
        except subprocess.TimeoutExpired:
            note(f"{library}: given up after {longest:.0f} seconds")
            continue
        except BusyError as error:
            note(f"{library}: {error}; no BLAS is chosen")
            return None
        if rate is not None:
            rates[library] = max(rate, rates.get(library, 0.0))
            note(f"{library}: {rate:.1f} tok/s promised")
            longest = min(longest, max(_MIN, _TIMES * (time.monotonic() - began)))
    if not rates:
        return None
    fastest = max(rates, key=lambda library: rates[library])
    try:
        prefer_library(fastest)
    except OSError as error:
        note(f"the fastest BLAS is {fastest}; not kept: {error.filename}: {error.strerror}")
    else:
        note(f"the BLAS from now on is {fastest}")
    return fastest


def _in_turn(here: Sequence[str], rates: Mapping[str, float]) -> Iterator[str]:
    """Yield each library, and again those whose rates, measured meanwhile, are similar."""
    yield from here
    close = [library for library in rates if rates[library] > _CLOSE * max(rates.values())]
    if len(close) > 1:
        yield from close


def restart_with(library: str) -> None:
    """Run this command again from its start, with this library; does not return."""
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, *sys.orig_argv[1:]]
    os.execve(sys.executable, command, {**os.environ, _CHOSEN: library})


def rate_with(library: str, loading: ModelOptions, longest: float) -> float | None:
    """Return the predicted tokens per second of a process with this library; None if it fails.

    Raises:
      subprocess.TimeoutExpired: it takes more than `longest` seconds
      BusyError: its times differ too much
    """
    with subprocess.Popen(
        [sys.executable, *ARGUMENTS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, _CHOSEN: library},
        start_new_session=True,  # Ctrl-C reaches only this process
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(json.dumps(asdict(loading)) + "\n")
            child.stdin.flush()
            child.wait(longest)  # stdin stays open: the child ends when it closes
            rate = child.stdout.read()
        finally:
            child.kill()
    if child.returncode == BUSY:
        raise BusyError("the machine is too busy to be measured")
    return float(rate) if rate else None
