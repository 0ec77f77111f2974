"""Several ranks answer as one process does, and none outlives another; all on this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import Queue

import pytest
import ranks
from tiny import random_model

from redrafter_mlx.cli import main
from redrafter_mlx.distributed.group import join_ranks
from redrafter_mlx.distributed.sharding import shard
from redrafter_mlx.distributed.watch import Door, Follower
from redrafter_mlx.errors import MismatchError, RedrafterError, UnsupportedModelError
from redrafter_mlx.runtime import launched
from redrafter_mlx.runtime.launched import Launch

SCRIPT = Path(ranks.__file__)
PATIENCE = 10.0
"""Seconds within which a lost rank ends the others."""

DEADLINE = 60.0
"""Seconds for whatever else a busy machine may do slowly."""


class Run:
    """The processes of one distributed run."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self.processes = processes

    def ask(self, name: str) -> object:
        """Have rank 0 do something of `ranks.WORK`; what it says next."""
        stdin = self.processes[0].stdin
        assert stdin is not None
        stdin.write(f"{name}\n")
        stdin.flush()
        return self.said()

    def said(self) -> object:
        """The next line of rank 0."""
        stdout = self.processes[0].stdout
        assert stdout is not None
        line = stdout.readline()
        assert line, self.end()
        return json.loads(line)

    def end(self, patience: float = DEADLINE) -> tuple[list[int], list[str]]:
        """The exit statuses and stderr of all ranks, which end by themselves."""
        deadline = time.monotonic() + patience
        statuses = [p.wait(max(deadline - time.monotonic(), 0.01)) for p in self.processes]
        return statuses, [process.stderr.read() for process in self.processes if process.stderr]

    def lose(self, rank: int) -> str:
        """Kill a rank; the one line of the others, which all end."""
        self.processes[rank].kill()
        statuses, errors = self.end(PATIENCE)
        others = [i for i in range(len(statuses)) if i != rank]
        assert all(statuses[i] == 1 for i in others), (statuses, errors)
        lines = [e for error in errors for e in error.splitlines() if e.startswith("error:")]
        assert len(lines) == 1, errors
        return lines[0]


@contextmanager
def started(model: str, size: int, tmp_path: Path, *extra: dict[str, str]) -> Iterator[Run]:
    """A run of so many ranks; `extra` adds to the environment of each rank in turn."""
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
            env={**os.environ, "PYTHONPATH": str(SCRIPT.parent), **named, **more},
        )  # fmt: skip
        processes.append(process)
    try:
        yield Run(processes)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_two_ranks_answer_as_one_process_and_end_together(tmp_path: Path) -> None:
    alone = ranks.redrafter_of(ranks.MODELS["for two"]())
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
    alone = ranks.redrafter_of(ranks.MODELS["for three"]())
    with started("for three", 3, tmp_path) as run:
        assert run.said() == "ready"
        assert run.ask("together") == ranks.together(alone)
        assert run.ask("endless") == "decoding"
        assert "rank 2" in run.lose(2)


def test_layers_are_shared_where_heads_do_not_divide(tmp_path: Path) -> None:
    alone = ranks.redrafter_of(ranks.MODELS["piped"]())
    with started("piped", 2, tmp_path) as run:
        assert run.said() == "ready"
        for work in (ranks.greedy, ranks.together, ranks.plain_batch):
            assert run.ask(work.__name__) == work(alone)
        assert "rank 0" in run.lose(0)  # between answers


def test_ranks_whose_sums_differ_emit_the_text_of_rank_0(tmp_path: Path) -> None:
    alone = ranks.redrafter_of(ranks.MODELS["for two"]())
    with started("for two", 2, tmp_path, {}, {"NOISE": "1e-7"}) as run:
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


FACTS = {"version": "1", "model": "a", "drafter": "trained"}


@pytest.mark.parametrize("fact", FACTS)
def test_a_rank_that_differs_is_refused_on_all_ranks(fact: str) -> None:
    door, ended = Door("127.0.0.1"), Endings()
    refused: list[str] = []

    def other(rank: int, facts: dict[str, str]) -> None:
        follower = Follower("127.0.0.1", door.port, door.token, rank, ended)
        with pytest.raises(MismatchError) as refusal:
            follower.compare(facts)
        refused.append(str(refusal.value))

    changed = {**FACTS, fact: "another"}
    threads = [
        threading.Thread(target=other, args=(rank, facts))
        for rank, facts in ((1, FACTS), (2, changed))
    ]
    for thread in threads:
        thread.start()
    leader = door.admit(2, ended)
    with pytest.raises(MismatchError) as refusal:
        leader.compare(FACTS)
    for thread in threads:
        thread.join(PATIENCE)
    assert refused == [str(refusal.value)] * 2
    assert f"rank 2 has another {fact}" in refused[0]
    leader.close()
    assert ended.of(2) == [0, 0]


class Endings(Queue[int]):
    """Statuses with which ranks that are threads of this test would end."""

    def __call__(self, status: int) -> None:
        self.put(status)

    def of(self, ranks: int) -> list[int]:
        """Of so many ranks, in order."""
        return sorted(self.get(timeout=PATIENCE) for _ in range(ranks))


def test_a_stranger_is_not_taken_for_a_rank() -> None:
    door, ended = Door("127.0.0.1"), Endings()
    for token in (b"wrong", door.token):
        threading.Thread(
            target=Follower, args=("127.0.0.1", door.port, token, 1, ended)
        ).start()  # fmt: skip
    leader = door.admit(1, ended)
    leader.close()
    assert ended.of(2) == [0, 1]


def test_a_rank_that_is_lost_before_it_has_its_model_ends_the_others() -> None:
    door, ended = Door("127.0.0.1"), Endings()
    follower = Follower("127.0.0.1", door.port, door.token, 1, ended)
    with socket.create_connection(("127.0.0.1", door.port)) as dying:
        for hello in ({"token": door.token.hex()}, {"rank": "2"}):
            dying.sendall(json.dumps(hello).encode() + b"\n")
        leader = door.admit(2, ended)
    assert ended.of(2) == [1, 1]
    del leader, follower


@pytest.mark.parametrize(
    ("model", "named"),
    [("gemma2", "parallelism"), ("llama", "num_attention_heads 4"), ("qwen3", "num_")],
)
def test_a_model_that_ranks_cannot_share_is_refused_by_name(model: str, named: str) -> None:
    class Group:
        def size(self) -> int:
            return 3

    with pytest.raises(UnsupportedModelError) as refusal:
        shard(random_model(model), model, Group())  # type: ignore[arg-type]
    assert model in str(refusal.value)
    assert named in str(refusal.value)


def test_a_launch_shares_one_model() -> None:
    launch = Launch()
    launch.join()
    with pytest.raises(RedrafterError, match="one model"):
        launch.join()


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("serve m --unload-after 1", "--unload-after"),
        ("bench --dtype float16,float32", "--dtype"),
    ],
)
def test_what_ranks_cannot_do_is_refused_before_a_model_is_loaded(
    line: str, named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLX_HOSTFILE", "hosts.json")
    monkeypatch.setenv("MLX_RANK", "0")
    assert main.run(line.split()) == 1
    assert named in capsys.readouterr().err


def test_a_hostfile_without_a_reachable_host_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text("[]")
    monkeypatch.setenv("MLX_HOSTFILE", str(hostfile))
    monkeypatch.setenv("MLX_RANK", "1")
    with pytest.raises(RedrafterError, match="hostfile"):
        join_ranks()


def test_a_rank_that_meets_no_other_ends_with_a_line(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts.json"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"], ["127.0.0.1:9"]]))
    ended = subprocess.run(
        [sys.executable, "-c", "from redrafter_mlx.distributed.group import join_ranks as join;"
                               "join(patience_seconds=1)"],
        env={**os.environ, "MLX_RANK": "0", "MLX_HOSTFILE": str(hostfile)},
        capture_output=True, text=True, timeout=DEADLINE,
    )  # fmt: skip
    assert ended.returncode == -signal.SIGKILL
    assert ended.stderr.startswith("error: rank 0 met no other rank")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "status"),
    [
        *((name, 0) for name in ("list", "doctor", "pull x", "show x", "drafters x")),
        ("quality no-folder", 0),
        ("export no-folder -o x --format medusa", 0),
        ("bench serve", 0),
        ("bench --compare a b", 0),
        ("chat --server x", 0),
        ("--help", 0),
        ("--version", 0),
        ("generate", 2),
        ("bench -r 0", 1),
    ],
)
def test_rank_0_alone_speaks_and_does_what_needs_no_ranks(
    line: str, status: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(launched.time, "sleep", slept.append)
    monkeypatch.setenv("MLX_HOSTFILE", "hosts.json")
    monkeypatch.setenv("MLX_RANK", "1")
    assert main.run(line.split()) == status
    out, err = capfd.readouterr()
    assert out == ""
    assert bool(err) == bool(slept) == bool(status)  # what it says, rank 0 has said meanwhile
