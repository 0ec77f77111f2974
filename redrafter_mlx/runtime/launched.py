"""Whether this process is one rank of `mlx.launch`."""

from __future__ import annotations

import os
import time

from redrafter_mlx.errors import RankError

_NAMING_SECONDS = 2.0


def launched_rank() -> int | None:
    """The rank of this process under `mlx.launch`; None if it runs alone."""
    rank = os.environ.get("MLX_RANK", "")
    hosts = any(os.environ.get(name) for name in ("MLX_HOSTFILE", "MLX_JACCL_COORDINATOR"))
    return int(rank) if hosts and rank.isdigit() else None


def wait_for_loss() -> None:
    """After a failed computation: if a rank was lost, this process ends here, with its name.

    A collective fails a moment before the thread that watches the connections names the rank.
    """
    if launched_rank() is not None:
        time.sleep(_NAMING_SECONDS)


class Launch:
    """Remembers whether this process has joined the other ranks: they follow one model."""

    def __init__(self) -> None:
        self._joined = False

    def join(self) -> None:
        """Call before joining; raises RankError the second time."""
        if self._joined:
            raise RankError(
                "the ranks of a launch share one model, and have one already; load it once, or "
                "start another launch"
            )
        self._joined = True


LAUNCH = Launch()
