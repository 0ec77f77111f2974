"""How the ranks of a launch start, what each of them prints, and how they end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from queue import Queue

import mlx.core as mx
import pytest
from tiny import random_model

from redrafter_mlx.cli import main
from redrafter_mlx.distributed.facts import facts_of
from redrafter_mlx.distributed.group import join_ranks
from redrafter_mlx.distributed.sharding import shard
from redrafter_mlx.distributed.watch import Door, FollowerConnection
from redrafter_mlx.errors import MismatchError, RedrafterError, UnsupportedModelError
from redrafter_mlx.runtime import launched
from redrafter_mlx.runtime.launched import Launch
from redrafter_mlx.target.source import TargetSource

PATIENCE = 30.0
"""Seconds to wait for threads on a busy machine."""

FACTS = {"version": "1", "model": "a", "drafter": "trained"}


@pytest.mark.parametrize("fact", FACTS)
def test_a_rank_that_differs_is_refused_on_all_ranks(fact: str) -> None:
    door, ended = Door("127.0.0.1"), Endings()
    refused: list[str] = []

    def other(rank: int, facts: dict[str, str]) -> None:
        follower = FollowerConnection("127.0.0.1", door.port, door.token, rank, ended)
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


def test_models_of_one_form_with_other_weights_differ(tmp_path: Path) -> None:
    facts = []
    for seed, name in enumerate(("one", "tuned", "copy")):
        folder = tmp_path / name
        folder.mkdir()
        weights = mx.random.normal((64, 64), key=mx.random.key(seed % 2))
        mx.save_safetensors(str(folder / "model.safetensors"), {"weight": weights})
        source = TargetSource(name, folder, "sha256:1", "llama", "float32", None, None)
        facts.append(facts_of(source, "auto"))
    assert facts[0]["model"] != facts[1]["model"]
    assert facts[0] == facts[2]


class Endings(Queue[int]):
    """Exit statuses of ranks that are simulated by threads of this test."""

    def __call__(self, status: int) -> None:
        self.put(status)

    def of(self, ranks: int) -> list[int]:
        """Return the statuses of this many ranks, sorted."""
        return sorted(self.get(timeout=PATIENCE) for _ in range(ranks))


@pytest.mark.parametrize("greeting", [b"", b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b"\xff\n", b"{}\n"])
def test_a_stranger_is_not_taken_for_a_rank(greeting: bytes) -> None:
    door, ended = Door("127.0.0.1"), Endings()
    with socket.create_connection(("127.0.0.1", door.port)) as stranger:
        stranger.sendall(greeting)
    rank = FollowerConnection("127.0.0.1", door.port, door.token, 1, ended)
    leader = door.admit(1, ended)
    leader.close()
    assert ended.of(1) == [0]
    del rank


def test_a_rank_of_another_launch_is_refused() -> None:
    door, ended = Door("127.0.0.1"), Endings()
    first_to_connect, rank = (
        FollowerConnection("127.0.0.1", door.port, token, 1, ended)
        for token in (b"wrong", door.token)
    )
    leader = door.admit(1, ended)
    leader.close()
    assert ended.of(2) == [0, 1]
    del first_to_connect, rank


def test_a_rank_that_is_lost_before_it_has_its_model_ends_the_others() -> None:
    door, ended = Door("127.0.0.1"), Endings()
    follower = FollowerConnection("127.0.0.1", door.port, door.token, 1, ended)
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
        capture_output=True, text=True, timeout=PATIENCE,
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
    assert bool(err) == bool(slept) == bool(status)  # it sleeps first: rank 0 reports it
