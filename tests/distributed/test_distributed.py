"""Several ranks on this machine answer as one process does, and none outlives another."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import ranks
from waiting import DEADLINE

SCRIPT = Path(ranks.__file__)
PATIENCE = 10.0
"""Seconds within which the loss of a rank must end the others."""


class Run:
    """The processes of one distributed run."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self.processes = processes

    def ask(self, name: str) -> object:
        """Send rank 0 a command of `ranks.WORK`; return its next line."""
        stdin = self.processes[0].stdin
        assert stdin is not None
        stdin.write(f"{name}\n")
        stdin.flush()
        return self.said()

    def said(self) -> object:
        """Return the next line of rank 0, decoded from JSON."""
        stdout = self.processes[0].stdout
        assert stdout is not None
        line = stdout.readline()
        assert line, self.end()
        return json.loads(line)

    def end(self, patience: float = DEADLINE) -> tuple[list[int], list[str]]:
        """Wait until all ranks have ended; return their exit statuses and stderr."""
        deadline = time.monotonic() + patience
        statuses = [p.wait(max(deadline - time.monotonic(), 0.01)) for p in self.processes]
        return statuses, [process.stderr.read() for process in self.processes if process.stderr]

    def lose(self, rank: int) -> str:
        """Kill a rank; all others must end, and the one error line of them all is returned.

        MLX's ring writes to stderr too, even before our line within its own.
        """
        self.processes[rank].kill()
        statuses, errors = self.end(PATIENCE)
        others = [i for i in range(len(statuses)) if i != rank]
        assert all(statuses[i] == 1 for i in others), (statuses, errors)
        lines = [e for error in errors for e in error.splitlines() if "error: rank" in e]
        assert len(lines) == 1, errors
        return lines[0]


@contextmanager
def started(model: str, size: int, tmp_path: Path, *extra: dict[str, str]) -> Iterator[Run]:
    """Start a run of `size` ranks; `extra` adds to the environment of each rank in turn."""
    with ExitStack() as stack:
        servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(size)]
        hosts = [[f"127.0.0.1:{server.getsockname()[1]}"] for server in servers]
        for server in servers:
            stack.enter_context(server)
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(json.dumps(hosts))
    processes = []
    for rank in range(size):
        named = {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hostfile)}
        more = extra[rank] if rank < len(extra) else {}
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), model, str(tmp_path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **named, **more},
        )  # fmt: skip
        processes.append(process)
    try:
        yield Run(processes)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_two_ranks_answer_as_one_process_and_end_together(tmp_path: Path) -> None:
    alone = ranks.redrafter_of("for two")
    with started("for two", 2, tmp_path) as run:
        assert run.said() == "ready"
        works = (
            ranks.greedy, ranks.seeded, ranks.turns, ranks.together,
            ranks.plain_batch, ranks.oracle, ranks.side_branches,
        )  # fmt: skip
        for work in works:
            assert run.ask(work.__name__) == work(alone), work.__name__
        layers = 2
        assert run.ask("collectives") == [[n, 2 * layers + 2] for n in (1, 4, 9)]
        assert run.ask("timed") is True
        run.processes[0].send_signal(signal.SIGINT)
        statuses, errors = run.end()
        assert statuses == [130, 0], errors


def test_three_ranks_answer_as_one_and_a_rank_lost_while_decoding_ends_all(tmp_path: Path) -> None:
    """They keep keys and values in 8 bits, in mlx-lm's own loop as well."""
    alone = ranks.redrafter_of("for three")
    with started("for three", 3, tmp_path) as run:
        assert run.said() == "ready"
        for work in (ranks.together, ranks.oracle):
            assert run.ask(work.__name__) == work(alone)
        assert run.ask("endless") == "decoding"
        assert "rank 2" in run.lose(2)


@pytest.mark.parametrize("model", ["piped", "hybrid"])
def test_layers_are_shared_where_parts_of_them_cannot_be(model: str, tmp_path: Path) -> None:
    """Because heads do not divide, or mlx-lm divides no output layer that we can take out."""
    alone = ranks.redrafter_of(model)
    with started(model, 2, tmp_path) as run:
        assert run.said() == "ready"
        for work in (ranks.greedy, ranks.together, ranks.plain_batch):
            assert run.ask(work.__name__) == work(alone)
        assert "rank 0" in run.lose(0)  # between answers


def test_ranks_whose_sums_differ_emit_the_text_of_rank_0(tmp_path: Path) -> None:
    """The noise is so large that every token of rank 1's own choice would be another one."""
    alone = ranks.redrafter_of("for two")
    with started("for two", 2, tmp_path, {}, {"NOISE": "1e3"}) as run:
        assert run.said() == "ready"
        for work in (ranks.greedy, ranks.plain_batch):
            assert run.ask(work.__name__) == work(alone)
        assert run.ask("reading") == "reading"
        assert "rank 1" in run.lose(1)


def test_two_ranks_write_the_corpus_of_one_block_for_block(tmp_path: Path) -> None:
    alone, together, helper = (tmp_path / name for name in ("alone", "0", "1"))
    ranks.corpus(alone)
    written = {path.name: path.read_bytes() for path in alone.glob("block-*")}
    assert len(written) >= 5
    third = "block-000003.safetensors"
    together.mkdir()
    shutil.copy(alone / third, together)  # from an earlier run
    with started("corpus", 2, tmp_path) as run:
        statuses, errors = run.end()
        assert statuses == [0, 0], errors
    got = {path.name: path.read_bytes() for path in together.glob("block-*")}
    assert {name: got[name] for name in written} == written
    assert "block-000001.safetensors" in {path.name for path in helper.iterdir()}
    assert third not in {path.name for path in helper.iterdir()}
