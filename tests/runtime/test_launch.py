"""How the ranks of a launch start, what each of them prints, and how they end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import NoReturn, cast

import mlx.core as mx
import mlx.nn as nn
import pytest
from command_line import CommandLine
from tiny import byte_tokenizer, random_model, tiny_source

from redrafter_mlx.cli import main
from redrafter_mlx.distributed import follower, watch
from redrafter_mlx.distributed.facts import facts_of
from redrafter_mlx.distributed.group import Ranks, join_ranks, leader_addresses
from redrafter_mlx.distributed.sharding import shard
from redrafter_mlx.distributed.watch import FollowerConnection, Listener
from redrafter_mlx.engine.options import EngineOptions
from redrafter_mlx.errors import (
    MismatchError,
    ModelNotFoundError,
    RankError,
    RedrafterError,
    UnsupportedModelError,
)
from redrafter_mlx.loading import load as loading
from redrafter_mlx.loading.target import LoadedTarget
from redrafter_mlx.runtime.processes import launched
from redrafter_mlx.runtime.processes.launched import join_once
from redrafter_mlx.target_model.fingerprint import nbytes_of
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.target_model.source import TargetSource
from redrafter_mlx.tuning.cost import setup_of

PATIENCE = 30.0
"""Seconds to wait for threads on a busy machine."""

HERE = ["127.0.0.1"]
NOWHERE = "255.255.255.255"
"""An address to which no connection can be made."""

FACTS = {"version": "1", "model": "a", "drafter": "trained"}


@pytest.mark.parametrize("fact", FACTS)
def test_a_rank_that_differs_is_refused_on_all_ranks(fact: str) -> None:
    listener, ended = Listener(), Endings()
    refused: list[str] = []

    def other(rank: int, facts: dict[str, str]) -> None:
        follower = FollowerConnection(HERE, listener.port, listener.token, rank, ended)
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
    leader = listener.admit(2, ended)
    with pytest.raises(MismatchError) as refusal:
        leader.compare(FACTS)
    for thread in threads:
        thread.join(PATIENCE)
    assert refused == [str(refusal.value)] * 2
    assert f"rank 2 has another {fact}" in refused[0]
    leader.close()
    assert ended.of(2) == [0, 0]


def test_a_stranger_who_writes_slowly_keeps_no_rank_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "INTRODUCTION_SECONDS", 0.5)
    listener, ended = Listener(), Endings()
    stranger = socket.create_connection(("localhost", listener.port))
    quiet = threading.Event()

    def drip() -> None:
        with contextlib.suppress(OSError):
            while not quiet.wait(0.1):
                stranger.sendall(b" ")

    dripping = threading.Thread(target=drip)
    dripping.start()
    time.sleep(0.2)  # it is first in the queue
    joining = threading.Thread(
        target=lambda: FollowerConnection(HERE, listener.port, listener.token, 1, ended)
    )
    joining.start()
    began = time.monotonic()
    leader = listener.admit(1, ended)
    assert time.monotonic() - began < 10
    quiet.set()
    for thread in (dripping, joining):
        thread.join(PATIENCE)
    leader.close()


def test_the_rank_with_the_least_free_memory_sets_the_limit() -> None:
    listener, ended = Listener(), Endings()
    bytes_of_free = {1: 300, 2: 70_000}
    followers = {
        rank: FollowerConnection(HERE, listener.port, listener.token, rank, ended)
        for rank in bytes_of_free
    }
    leader = listener.admit(2, ended)
    threads = [
        threading.Thread(target=Ranks(group_of(3, rank), one).agree, args=(FACTS, free))
        for (rank, one), free in zip(followers.items(), bytes_of_free.values(), strict=True)
    ]
    for thread in threads:
        thread.start()
    assert Ranks(group_of(3), leader).agree(FACTS, 5000) == 300
    leader.close()
    assert ended.of(2) == [0, 0]


@pytest.mark.parametrize("given", [None, 12345])
def test_answers_are_admitted_by_the_memory_of_all_ranks(
    given: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limits: list[int | None] = []
    model = random_model()
    source = tiny_source(tmp_path)
    target = LoadedTarget.of(model, byte_tokenizer(), source)
    monkeypatch.setattr(
        loading, "join_ranks", lambda: SimpleNamespace(leads=True, agree=lambda _, free: free // 2)
    )
    monkeypatch.setattr(loading, "load_target", lambda *_, **__: target)
    monkeypatch.setattr(loading, "facts_of", lambda *_: FACTS)
    monkeypatch.setattr(loading, "memory_limit", lambda: nbytes_of(model) + 1000)
    monkeypatch.setattr(
        loading, "draft_with", lambda *_, engine, **__: limits.append(engine.memory_bytes)
    )
    loading.load("tiny", engine=EngineOptions(memory_bytes=given))
    assert limits == [nbytes_of(model) + 500 if given is None else given]


@pytest.mark.parametrize("leads", [True, False])
def test_a_drafters_files_are_needed_on_rank_0_alone(
    leads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LoadsTargetError(Exception):
        pass

    def load_target(*_: object, **__: object) -> NoReturn:
        raise LoadsTargetError

    monkeypatch.setattr(loading, "join_ranks", lambda: SimpleNamespace(leads=leads))
    monkeypatch.setattr(loading, "load_target", load_target)
    with pytest.raises(ModelNotFoundError if leads else LoadsTargetError):
        loading.load("tiny", "/no/such/drafter")


def test_the_machine_of_a_follower_is_kept_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    awake: list[bool] = []

    @contextmanager
    def kept_awake() -> Iterator[None]:
        awake.append(True)
        yield
        awake.append(False)

    def receive(_: Ranks) -> NoReturn:
        assert awake == [True]
        sys.exit(7)

    monkeypatch.setattr(follower, "kept_awake", kept_awake)
    monkeypatch.setattr(follower, "receive", receive)
    with pytest.raises(SystemExit, match="7"):
        follower.follow(Target(random_model()), cast(Ranks, None))


def test_costs_are_stored_by_backend_and_number_of_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, paths = random_model(), []
    for hosts in ("", "ab", "aa", "cc"):
        hostfile = tmp_path / f"{hosts}.json"
        hostfile.write_text(json.dumps([[f"{host}:{i}"] for i, host in enumerate(hosts)]))
        monkeypatch.setenv("MLX_HOSTFILE", str(hostfile) if hosts else "")
        paths.append(setup_of(model, Target(model), "none").key)
    monkeypatch.setenv("MLX_HOSTFILE", "")
    monkeypatch.setenv("MLX_JACCL_COORDINATOR", "a:1")
    paths.append(setup_of(model, Target(model), "none").key)
    alone, two, one, another_one, rdma = paths
    assert len({alone, two, one, rdma}) == 4
    assert another_one == one


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


def test_a_rank_tries_the_addresses_of_rank_0_in_turn() -> None:
    listener, ended = Listener(), Endings()
    rank = FollowerConnection([NOWHERE, *HERE], listener.port, listener.token, 1, ended)
    listener.admit(1, ended).close()
    assert ended.of(1) == [0]
    del rank
    with pytest.raises(RankError, match=f"rank 1 .*{NOWHERE}.*{HERE[0]}"):
        FollowerConnection([NOWHERE, *HERE], listener.port, listener.token, 1, ended)


def test_rank_0_names_the_address_on_the_way_to_each_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a ring of Thunderbolt links, the hostfile names its address on one of them."""
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(json.dumps([["192.0.2.1:1"], [f"{NOWHERE}:1", f"{HERE[0]}:1"]]))
    monkeypatch.setenv("MLX_HOSTFILE", str(hostfile))
    assert leader_addresses()[:2] == ["192.0.2.1", *HERE]
    monkeypatch.delenv("MLX_HOSTFILE")
    monkeypatch.setenv("MLX_JACCL_COORDINATOR", "[2001:db8::1]:32323")
    assert leader_addresses()[0] == "2001:db8::1"


@pytest.mark.parametrize(
    "greeting",
    [b"", b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b"\xff\n", b"{}\n", b"[" * 100_000 + b"\n"],
)
def test_a_stranger_is_not_taken_for_a_rank(greeting: bytes) -> None:
    listener, ended = Listener(), Endings()
    with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
        stranger.sendall(greeting)
    rank = FollowerConnection(HERE, listener.port, listener.token, 1, ended)
    leader = listener.admit(1, ended)
    leader.close()
    assert ended.of(1) == [0]
    del rank


def test_a_rank_of_another_launch_is_refused() -> None:
    listener, ended = Listener(), Endings()
    first_to_connect, rank = (
        FollowerConnection(HERE, listener.port, token, 1, ended)
        for token in (b"wrong", listener.token)
    )
    leader = listener.admit(1, ended)
    leader.close()
    assert ended.of(2) == [0, 1]
    del first_to_connect, rank


def test_a_rank_that_is_lost_before_it_has_its_model_ends_the_others() -> None:
    listener, ended = Listener(), Endings()
    follower = FollowerConnection(HERE, listener.port, listener.token, 1, ended)
    with socket.create_connection(("127.0.0.1", listener.port)) as dying:
        for hello in ({"token": listener.token.hex()}, {"rank": "2"}):
            dying.sendall(json.dumps(hello).encode() + b"\n")
        leader = listener.admit(2, ended)
    assert ended.of(2) == [1, 1]
    del leader, follower


@pytest.mark.parametrize(
    ("model", "named"),
    [("gemma2", "parallelism"), ("llama", "num_attention_heads 4"), ("qwen3", "num_")],
)
def test_a_model_that_ranks_cannot_share_is_refused_by_name(model: str, named: str) -> None:
    with pytest.raises(UnsupportedModelError) as refusal:
        shard(random_model(model), model, group_of(3))
    assert model in str(refusal.value)
    assert named in str(refusal.value)


def test_inputs_of_quantised_layers_are_divided_in_whole_groups() -> None:
    def share(model: str, size: int) -> str:
        quantised = random_model(model, hidden_size=128, intermediate_size=size)
        nn.quantize(quantised, group_size=32)
        return shard(quantised, model, group_of(2))

    assert share("llama", 128) == share("qwen2", 128) == "tensor"
    assert share("qwen2", 96) == "pipeline"
    with pytest.raises(UnsupportedModelError, match="down_proj's group count 3 "):
        share("llama", 96)


def group_of(ranks: int, rank: int = 0) -> mx.distributed.Group:
    group = SimpleNamespace(size=lambda: ranks, rank=lambda: rank)
    return cast(mx.distributed.Group, group)


def test_a_launch_shares_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redrafter_mlx.runtime.processes.launched.JOINED", threading.Event())
    join_once()
    with pytest.raises(RedrafterError, match="one model"):
        join_once()


@pytest.mark.parametrize(
    ("line", "named"),
    [("serve m --unload-after 1", "--unload-after"), ("bench --dtype float16,float32", "--dtype")],
)
def test_what_ranks_cannot_do_is_refused_before_a_model_is_loaded(
    line: str, named: str, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    monkeypatch.setenv("MLX_HOSTFILE", "hosts.json")
    monkeypatch.setenv("MLX_RANK", "0")
    assert named in cli.error(*line.split())


@pytest.mark.parametrize("size", ["MLX_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_ranks_of_another_backend_do_not_each_run_alone(
    size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(size, "1")
    assert join_ranks() is None
    monkeypatch.setenv(size, "2")
    with pytest.raises(RankError, match="--backend ring or jaccl"):
        join_ranks()


def test_one_process_that_was_launched_runs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text("\n")  # as mlx.launch -n 1 writes it
    monkeypatch.setenv("MLX_HOSTFILE", str(hostfile))
    monkeypatch.setenv("MLX_RANK", "0")
    assert launched.launched_rank() is None
    assert join_ranks() is None


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
