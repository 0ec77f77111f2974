"""The ranks that `mlx.launch` started: connecting, and comparing what they must share."""

from __future__ import annotations

import atexit
import json
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import mlx.core as mx

from redrafter_mlx.distributed.patience import patience
from redrafter_mlx.distributed.watch import (
    TOKEN_BYTES,
    Door,
    Facts,
    FollowerConnection,
    LeaderConnections,
)
from redrafter_mlx.errors import BadInputError, RankError
from redrafter_mlx.runtime.launched import LAUNCH, launched_rank

_REMEDY = "check the hostfile's addresses"


@dataclass(frozen=True)
class Ranks:
    """This process, as one of the ranks that compute together.

    Rank 0 decides and answers; the others repeat its calls of the target.
    """

    group: mx.distributed.Group
    connection: LeaderConnections | FollowerConnection

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def part(self) -> None:
        """Continue on rank 0 alone; the processes of the other ranks end here."""
        if isinstance(self.connection, LeaderConnections):
            self.connection.close()
        else:
            threading.Event().wait()

    def agree(self, facts: Facts) -> None:
        """Compare the facts that all ranks must share.

        Raises MismatchError, on all ranks, naming the rank and the fact that differs.
        """
        self.connection.compare(facts)

    def broadcast(self, given: mx.array) -> mx.array:
        """Return one rank's array on every rank; the others pass zeros of its shape."""
        return mx.distributed.all_sum(given, group=self.group)


def join_ranks(patience_seconds: float = 60.0) -> Ranks | None:
    """Connect to the other ranks of this launch; None if this process runs alone.

    Ranks other than 0 ignore Ctrl-C from then on, because they end with rank 0. A rank that reaches
    no other one within `patience_seconds` prints a line about it and ends.

    Raises RankError if the ranks cannot be reached, or were joined before.
    """
    rank = launched_rank()
    if rank is None:
        return None
    lonely = f"rank {rank} met no other rank in {patience_seconds:g} seconds; {_REMEDY}"
    with patience(patience_seconds, lonely):
        try:
            group = mx.distributed.init(strict=True)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise RankError(
                f"rank {rank} cannot reach its neighbours: {reason}; {_REMEDY}"
            ) from error
        LAUNCH.join()
        if rank and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        return Ranks(group, _connect(group))


def _connect(group: mx.distributed.Group) -> LeaderConnections | FollowerConnection:
    host, door = _leader_address(), None
    if group.rank() == 0:
        door = Door(host)
        words = mx.array([door.port, *door.token], mx.int32)
    else:
        words = mx.zeros((1 + TOKEN_BYTES,), mx.int32)
    received = cast("list[int]", mx.distributed.all_sum(words, group=group).tolist())
    if door is None:
        return FollowerConnection(host, received[0], bytes(received[1:]), group.rank())
    leader = door.admit(group.size() - 1)
    atexit.register(leader.close)
    return leader


def _leader_address() -> str:
    """Return rank 0's address, as it was given to the backend."""
    hostfile = os.environ.get("MLX_HOSTFILE")
    try:
        if hostfile:
            named = json.loads(Path(hostfile).read_text(encoding="utf-8"))[0]
            address = str(named if isinstance(named, str) else named[0])
        else:
            address = os.environ["MLX_JACCL_COORDINATOR"]
    except (OSError, ValueError, IndexError, KeyError, TypeError) as error:
        raise BadInputError(
            f"the hostfile {hostfile} names no address of rank 0; see mlx.launch --help"
        ) from error
    return address.rpartition(":")[0].strip("[]")
