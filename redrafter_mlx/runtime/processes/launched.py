"""Whether this process is one rank of `mlx.launch`, and what is left to rank 0."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from redrafter_mlx.errors import BadInputError, RankError

_NAMING_SECONDS = 2.0

_ENDING_SECONDS = 5.0

JOINED = threading.Event()
"""Whether this process has joined the other ranks, which follow one model."""


def launched_rank() -> int | None:
    """Return the rank of this process under `mlx.launch`; None if it runs alone."""
    rank = os.environ.get("MLX_RANK", "")
    return int(rank) if rank.isdigit() and launch_backend() is not None else None


def launch_backend() -> str | None:
    """Return the launch's backend, "ring" or "jaccl"; None if this process runs alone."""
    hostfile = os.environ.get("MLX_HOSTFILE")
    if hostfile and not _is_empty(Path(hostfile)):
        return "ring"
    return "jaccl" if os.environ.get("MLX_JACCL_COORDINATOR") else None


def launch_name() -> str:
    """Return the backend of this launch, and its machines if they may run several ranks each.

    Such as `ring of 2`; empty if this process runs alone.
    """
    backend = launch_backend()
    if backend == "ring":
        return f"ring of {len({tuple(addresses[:1]) for addresses in rank_addresses()})}"
    return backend or ""


def rank_addresses() -> list[list[str]]:
    """Return each rank's addresses in the hostfile of the ring, or rank 0's alone with jaccl.

    Raises BadInputError if the hostfile names none.
    """
    hostfile = os.environ.get("MLX_HOSTFILE")
    try:
        if hostfile:
            named = json.loads(Path(hostfile).read_text(encoding="utf-8"))
            ranks = [[each] if isinstance(each, str) else each for each in named]
        else:
            ranks = [[os.environ["MLX_JACCL_COORDINATOR"]]]
        addresses = [[str(at).rpartition(":")[0].strip("[]") for at in each] for each in ranks]
    except (OSError, ValueError, KeyError, TypeError):
        addresses = []
    if not addresses:
        raise BadInputError(
            f"the hostfile {hostfile} names no address of rank 0; see mlx.launch --help"
        )
    return addresses


def check_backend() -> None:
    """Raise RankError if other processes were launched that this one would not join."""
    sizes = (os.environ.get(name, "") for name in ("MLX_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"))
    if launch_backend() is None and any(size.isdigit() and int(size) > 1 for size in sizes):
        raise RankError("this launch has another backend; give mlx.launch --backend ring or jaccl")


def _is_empty(hostfile: Path) -> bool:
    """Whether a hostfile is the empty one of a launch of one process."""
    try:
        return not hostfile.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return False


def wait_for_loss() -> None:
    """After a failed computation, give the watching thread time to name a lost rank.

    A collective fails a moment before that thread notices the loss and ends this process.
    """
    if launched_rank() is not None:
        time.sleep(_NAMING_SECONDS)


@contextmanager
def rank_0_speaks() -> Iterator[None]:
    """Silence the other ranks: rank 0 prints the same."""
    if not launched_rank():
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def leave_to_rank_0() -> None:
    """End every rank but 0 here; call this before work that one process does alone."""
    if launched_rank():
        sys.exit()


def let_rank_0_fail() -> None:
    """Before another rank reports an error, give rank 0 time to report the same one.

    `mlx.launch` ends all ranks when one fails, so this rank then ends here, without a report.
    """
    if launched_rank():
        time.sleep(_ENDING_SECONDS)


def join_once() -> None:
    """Record that this process joins the other ranks; raises RankError the second time."""
    if JOINED.is_set():
        raise RankError(
            "the ranks of a launch share one model, and have one already; load it once, or "
            "start another launch"
        )
    JOINED.set()
