"""Detection of lost ranks: the system closes a rank's connection to rank 0 when the rank ends.

MLX's collectives wait for ever for a lost rank. So a thread of each rank watches the connection;
when that closes, the thread names the lost rank and ends its own process.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TextIO

from redrafter_mlx.errors import MismatchError, RankError

_CONNECT_SECONDS = 30.0

INTRODUCTION_SECONDS = 5.0
"""Seconds in which a newcomer must have sent its token and rank."""

_MAX_CHARACTERS = 1 << 20
"""Maximum length of a message."""

Facts = Mapping[str, str]
"""What ranks must have in common, as text by name."""

Leave = Callable[[int], None]
"""Ends this process with an exit status; its collectives would wait for ever."""


class Listener:
    """The socket on which other ranks connect to rank 0, and the token that they must send.

    It listens at all addresses, because each machine of a ring may reach another one of them.
    """

    def __init__(self) -> None:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._listening = socket.create_server(("", 0), family=family, dualstack_ipv6=both)
        self.port: int = self._listening.getsockname()[1]
        self.token = secrets.token_bytes(16)

    def admit(self, others: int, leave: Leave = os._exit) -> LeaderConnections:
        """Wait until `others` ranks have connected. Raises RankError if one does not."""
        lines: dict[int, _Line] = {}
        deadline = time.monotonic() + _CONNECT_SECONDS
        try:
            while len(lines) < others:
                self._listening.settimeout(max(deadline - time.monotonic(), 0.01))
                connection, _ = self._listening.accept()
                line = _Line(connection)
                hurry = threading.Timer(INTRODUCTION_SECONDS, _hang_up, [connection])
                hurry.start()
                rank = self._rank_of(line)
                hurry.cancel()
                if rank is None:
                    connection.close()
                else:
                    lines[rank] = line
        except OSError as error:
            missing = sorted(set(range(1, others + 1)) - set(lines))
            raise RankError(f"rank {missing[0]} did not connect to rank 0") from error
        finally:
            self._listening.close()
        return LeaderConnections(lines, leave)

    def _rank_of(self, line: _Line) -> int | None:
        """Return the rank that has connected; None for a stranger, who does not know the token."""
        try:
            if line.read() != {"token": self.token.hex()}:
                return None
            return int(line.read()["rank"])
        except (OSError, ValueError, KeyError, RecursionError):
            return None


class LeaderConnections:
    """Rank 0's end of every connection; all ranks end when one is lost."""

    def __init__(self, lines: dict[int, _Line], leave: Leave = os._exit) -> None:
        self._lines = lines
        self._leave = leave
        self._closing = False
        self._facts: dict[int, Future[Facts]] = {rank: Future() for rank in lines}
        for rank in lines:
            threading.Thread(target=self._listen, args=(rank,), daemon=True).start()

    def compare(self, mine: Facts) -> list[Facts]:
        """Return the other ranks' facts, which may be more than `mine`.

        Raises MismatchError, on every rank, if a fact of any rank differs from `mine`.
        """
        others = {rank: theirs.result() for rank, theirs in self._facts.items()}
        for rank, theirs in others.items():
            for fact, value in mine.items():
                if theirs.get(fact) != value:
                    why = (
                        f"rank {rank} has another {fact} than rank 0: {theirs.get(fact)} and not "
                        f"{value}; give every machine the same"
                    )
                    self._send({"refused": why})
                    raise MismatchError(why)
        self._send({"agreed": "yes"})
        return [*others.values()]

    def close(self) -> None:
        """Tell the other ranks that the work is done. It may be called again."""
        self._closing = True
        self._send({"done": "yes"})

    def _listen(self, rank: int) -> None:
        line = self._lines[rank]
        try:
            self._facts[rank].set_result(line.read())
            line.read()
        except (OSError, ValueError):
            if not self._closing:
                why = f"rank {rank} is gone; all ranks end"
                _print_error(why)
                self._send({"lost": why})
                self._leave(1)

    def _send(self, message: Facts) -> None:
        for line in self._lines.values():
            line.write(message)


class FollowerConnection:
    """Another rank's end of its connection to rank 0; its process ends with rank 0's."""

    def __init__(
        self, hosts: Sequence[str], port: int, token: bytes, rank: int, leave: Leave = os._exit
    ) -> None:
        """Raises RankError if rank 0 cannot be reached at any of the addresses `hosts`."""
        connection = _connect(hosts, port, rank)
        connection.settimeout(None)
        self._line = _Line(connection)
        self._leave = leave
        self._answer: Future[Facts] = Future()
        self._line.write({"token": token.hex()})
        self._line.write({"rank": str(rank)})
        threading.Thread(target=self._listen, daemon=True).start()

    def compare(self, mine: Facts) -> list[Facts]:
        """Return no facts; raises MismatchError if rank 0 refuses this rank or another one."""
        self._line.write(mine)
        answer = self._answer.result()
        if "refused" in answer:
            raise MismatchError(answer["refused"])
        return []

    def _listen(self) -> None:
        try:
            message = self._line.read()
            if not message.keys() & {"done", "lost"}:
                self._answer.set_result(message)
                message = self._line.read()
        except (OSError, ValueError):
            message = {"lost": "rank 0"}
            _print_error("rank 0 is gone; all ranks end")
        self._leave(0 if "done" in message else 1)


class _Line:
    """A connection that carries JSON objects of strings, one per line."""

    def __init__(self, connection: socket.socket) -> None:
        _keep_alive(connection)
        self._connection = connection
        self._file: TextIO = connection.makefile("r", encoding="utf-8")

    def write(self, message: Facts) -> None:
        """Send a line; if the other end is gone, the thread that reads will notice."""
        try:
            self._connection.sendall(json.dumps(dict(message)).encode() + b"\n")
        except OSError:
            return

    def read(self) -> dict[str, str]:
        """Return the next line; raises OSError or ValueError once the other end is gone."""
        line = self._file.readline(_MAX_CHARACTERS)
        if not line:
            raise ConnectionResetError("the other end is gone")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("no message of a rank")
        return {str(key): str(value) for key, value in message.items()}


def _connect(hosts: Sequence[str], port: int, rank: int) -> socket.socket:
    """Connect to rank 0 at the first address that answers."""
    seconds, reasons = _CONNECT_SECONDS / 2 / len(hosts), []  # before rank 0 gives up
    for host in hosts:
        try:
            return socket.create_connection((host, port), timeout=seconds)
        except OSError as error:
            reasons.append(f"{host} ({error.strerror or error})")
    raise RankError(
        f"rank {rank} cannot reach rank 0 at {', '.join(reasons)}; connect both machines to one "
        f"network that no firewall blocks"
    )


def _hang_up(connection: socket.socket) -> None:
    """End a connection that another thread reads."""
    with contextlib.suppress(OSError):  # it is closed
        connection.shutdown(socket.SHUT_RDWR)


def _keep_alive(connection: socket.socket) -> None:
    """Let the system detect within ten seconds that a machine vanished without closing."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (("TCP_KEEPIDLE", 3), ("TCP_KEEPALIVE", 3), ("TCP_KEEPINTVL", 2),
                          ("TCP_KEEPCNT", 3)):  # fmt: skip
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)


def _print_error(why: str) -> None:
    """Print to the process's own stderr, even while it is redirected."""
    print(f"error: {why}", file=sys.__stderr__, flush=True)
