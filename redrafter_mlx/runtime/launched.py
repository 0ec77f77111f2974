"""Whether this process is one rank of `mlx.launch`, and what is left to rank 0."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

from redrafter_mlx.errors import RankError

_NAMING_SECONDS = 2.0

_ENDING_SECONDS = 5.0


def launched_rank() -> int | None:
    """Return the rank of this process under `mlx.launch`; None if it runs alone."""
    rank = os.environ.get("MLX_RANK", "")
    hosts = any(os.environ.get(name) for name in ("MLX_HOSTFILE", "MLX_JACCL_COORDINATOR"))
    return int(rank) if hosts and rank.isdigit() else None


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


class Launch:
    """Records whether this process has joined the other ranks, which follow one model."""

    def __init__(self) -> None:
        self._joined = False

    def join(self) -> None:
        """Record that this process joins; raises RankError the second time."""
        if self._joined:
            raise RankError(
                "the ranks of a launch share one model, and have one already; load it once, or "
                "start another launch"
            )
        self._joined = True


LAUNCH = Launch()
