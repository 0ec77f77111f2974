"""The ranks that `mlx.launch` started: connecting, and comparing what they must share."""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import numpy as np

from redrafter_mlx.distributed.watch import Facts, FollowerConnection, LeaderConnections, Listener
from redrafter_mlx.errors import RankError
from redrafter_mlx.runtime.processes.launched import (
    check_backend,
    join_once,
    launched_rank,
    rank_addresses,
)

_REMEDY = "check the hostfile's addresses"

_FREE_BYTES = "free bytes"
"""Name under which the other ranks send their free memory along with the facts."""

_WATCH = """
import os, select, signal, sys
parent, seconds, why = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
try:
    if select.select([sys.stdin], [], [], seconds)[0]:
        sys.exit()
    print(why, file=sys.stderr)
except KeyboardInterrupt:
    pass
if os.getppid() == parent:
    os.kill(parent, signal.SIGKILL)
"""
"""Program of the process that watches in `_patience`."""


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

    def leave(self) -> None:
        """Continue on rank 0 alone; the processes of the other ranks end here."""
        if isinstance(self.connection, LeaderConnections):
            self.connection.close()
        else:
            threading.Event().wait()

    def agree(self, facts: Facts, free_bytes: int = 0) -> int:
        """Compare the facts that all ranks must share.

        Returns:
          on rank 0, the smallest `free_bytes` of all ranks
        Raises:
          MismatchError: on all ranks, naming the rank and the fact that differs
        """
        others = self.connection.compare(
            facts if self.leads else {**facts, _FREE_BYTES: str(free_bytes)}
        )
        return min([free_bytes, *(int(theirs[_FREE_BYTES]) for theirs in others)])

    def broadcast(self, given: mx.array) -> mx.array:
        """Return one rank's array on every rank; the others pass zeros of its shape."""
        return mx.distributed.all_sum(given, group=self.group)

    def broadcast_bytes(self, given: bytes = b"") -> bytes:
        """Return one rank's bytes on every rank; the others pass none."""
        return broadcast_bytes(self.group, given)


def broadcast_bytes(group: mx.distributed.Group, given: bytes = b"") -> bytes:
    """Return one rank's bytes on every rank; the others pass none."""
    size = cast(int, mx.distributed.all_sum(mx.array(len(given), mx.int64), group=group).item())
    words = np.frombuffer(given.ljust(-(-size // 4) * 4, b"\0"), np.int32)
    return np.array(mx.distributed.all_sum(mx.array(words), group=group)).tobytes()[:size]


def join_ranks(patience_seconds: float = 60.0) -> Ranks | None:
    """Connect to the other ranks of this launch; None if this process runs alone.

    Ranks other than 0 ignore Ctrl-C from then on, because they end with rank 0. A rank that reaches
    no other one within `patience_seconds` prints a line about it and ends.

    Raises RankError if the ranks cannot be reached, or were joined before, or were launched with a
    backend that is not supported.
    """
    rank = launched_rank()
    if rank is None:
        check_backend()
        return None
    lonely = f"rank {rank} met no other rank in {patience_seconds:g} seconds; {_REMEDY}"
    with _patience(patience_seconds, lonely):
        try:
            group = mx.distributed.init(strict=True)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise RankError(
                f"rank {rank} cannot reach its neighbours: {reason}; {_REMEDY}"
            ) from error
        join_once()
        if rank and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        return Ranks(group, _connect(group))


@contextmanager
def _patience(seconds: float, why: str) -> Iterator[None]:
    """Kill this process, after printing `why`, if the body takes longer; kill it at Ctrl-C too.

    A separate process watches, because no Python thread can run while MLX connects.
    """
    given = (str(os.getpid()), str(seconds), f"error: {why}")
    command = [sys.executable, "-IS", "-c", _WATCH, *given]
    with subprocess.Popen(command, stdin=subprocess.PIPE):  # its input closes with the body
        yield


def _connect(group: mx.distributed.Group) -> LeaderConnections | FollowerConnection:
    if group.rank() == 0:
        listener = Listener()
        told = json.dumps([leader_addresses(), listener.port, listener.token.hex()])
        broadcast_bytes(group, told.encode())
        leader = listener.admit(group.size() - 1)
        atexit.register(leader.close)
        return leader
    hosts, port, token = json.loads(broadcast_bytes(group))
    return FollowerConnection(hosts, port, bytes.fromhex(token), group.rank())


def leader_addresses() -> list[str]:
    """Return addresses at which other ranks may reach this one, rank 0; the likeliest come first.

    The hostfile of a Thunderbolt ring names rank 0's address on the link to one neighbour. The
    other ranks reach it at its address on the way to theirs, or by its name.
    """
    own, *others = rank_addresses()
    ways = (_address_towards(host) for hosts in others for host in hosts)
    return list(dict.fromkeys([*own, *filter(None, ways), socket.gethostname()]))


def _address_towards(host: str) -> str | None:
    """Return this machine's address on the way to a host, without sending anything."""
    with suppress(OSError):
        family, kind, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)
            return str(probe.getsockname()[0])
    return None
