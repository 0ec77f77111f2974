"""Repositories come as folders, complete, with what is needed of them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import mlx.core as mx
import pytest
from command_line import CommandLine
from fake_hub import COMMIT, FakeHub
from repositories import DRAFTER, REPO_FILES
from tiny import random_drafter

from redrafter_mlx.drafting.recurrent import save_drafter
from redrafter_mlx.errors import DamagedFileError, DownloadError, ModelNotFoundError
from redrafter_mlx.loading.target import load_target
from redrafter_mlx.weights import log_progress, registry
from redrafter_mlx.weights.fetching.resolve import find_local, pull, resolve


@pytest.mark.parametrize("name", ["org/repo", "vicuna-7b", "vicuna-33b"])
def test_repository_comes_as_a_folder_at_its_revision(hub: FakeHub, name: str) -> None:
    entry = registry.REGISTRY.get(name)
    hub.repos[(entry.repo, entry.revision) if entry else (name, "main")] = REPO_FILES
    folder = resolve(name).path
    assert {p.name for p in folder.iterdir()} == {
        n for n in REPO_FILES if n.endswith((".json", ".safetensors"))
    }
    hub.asked.clear()
    assert resolve(name).path == folder
    assert hub.asked == []
    pull(name)
    assert hub.asked != []


@pytest.mark.parametrize(
    ("weights", "unwanted"),
    [
        (["pytorch_model.bin"], []),
        (["medusa_lm_head.pt"], []),
        (["heads.safetensors"], ["pytorch_model.bin", "medusa_lm_head.pt"]),
        (["pytorch_model.bin.index.json", "pytorch_model-1.bin"], ["other.bin"]),
    ],
)
def test_a_drafters_repository_comes_with_the_files_that_it_needs(
    hub: FakeHub, weights: list[str], unwanted: list[str]
) -> None:
    index = json.dumps({"weight_map": {"a": "pytorch_model-1.bin"}}).encode()
    files = {n: index if n.endswith(".json") else b"1" * 100 for n in [*weights, *unwanted]}
    others = {n: c for n, c in DRAFTER.items() if n not in ("pytorch_model.bin", "vocab.txt")}
    hub.repos["org/eagle", "main"] = {**others, **files}
    folder = resolve("org/eagle").path
    assert {p.name for p in folder.iterdir()} == {"config.json", *weights}
    hub.asked.clear()
    assert resolve("org/eagle").path == folder
    assert hub.asked == []


def test_a_revision_comes_with_the_name(hub: FakeHub) -> None:
    hub.repos["org/medusa", "refs/pr/1"] = DRAFTER
    name = "org/medusa@refs/pr/1"
    with pytest.raises(DownloadError, match=rf"--offline.*redrafter-mlx pull {name}$"):
        resolve(name, offline=True)
    local = resolve(name)
    assert (local.path / "pytorch_model.bin").read_bytes() == DRAFTER["pytorch_model.bin"]
    assert resolve(name, offline=True).path == local.path
    assert find_local("org/medusa") is None
    with pytest.raises(ModelNotFoundError):
        resolve("org/medusa")


def test_interrupted_repository_is_never_taken_for_a_whole_one(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)  # huggingface-hub waits between attempts
    hub.repos["org/repo", "main"] = REPO_FILES
    hub.broken_off.add("model-00002-of-00002.safetensors")
    with pytest.raises(DownloadError, match="redrafter-mlx pull org/repo"):
        resolve("org/repo")
    assert find_local("org/repo") is None
    hub.broken_off.clear()
    last = resolve("org/repo").path / "model-00002-of-00002.safetensors"
    assert last.read_bytes() == b"2" * 100


def test_an_interrupted_update_leaves_the_older_download_usable(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    hub.repos["org/repo", "main"] = REPO_FILES
    before = resolve("org/repo").path
    hub.commit = COMMIT[::-1]
    newer = {n: c + b" " for n, c in REPO_FILES.items()}
    hub.repos["org/repo", "main"] = newer
    hub.broken_off.add("model-00002-of-00002.safetensors")
    with pytest.raises(DownloadError):
        pull("org/repo")
    assert resolve("org/repo", offline=True).path == before
    hub.broken_off.clear()
    after = pull("org/repo").path
    assert resolve("org/repo", offline=True).path == after != before
    assert (after / "config.json").read_bytes() == newer["config.json"]


def test_a_gated_repository_says_where_to_accept_its_terms(hub: FakeHub) -> None:
    hub.repos["org/gated", "main"] = REPO_FILES
    hub.gated.add("org/gated")
    with pytest.raises(ModelNotFoundError, match="accept its terms on its Hub page"):
        pull("org/gated")


def test_pull_replaces_a_truncated_file_of_a_repository(hub: FakeHub) -> None:
    hub.repos["org/repo", "main"] = REPO_FILES
    shard = resolve("org/repo").path / "model-00001-of-00002.safetensors"
    shard.resolve().write_bytes(b"1" * 50)
    with pytest.raises(DamagedFileError, match=r"run: redrafter-mlx pull org/repo$"):
        load_target("org/repo")
    assert (pull("org/repo").path / shard.name).read_bytes() == b"1" * 100


def test_local_path_is_taken_as_it_is(hub: FakeHub, tmp_path: Path) -> None:
    assert (resolve(tmp_path).path, resolve(tmp_path).remedy) == (tmp_path.resolve(), None)
    assert pull(tmp_path).path == tmp_path.resolve()
    assert hub.asked == []


def test_a_download_that_no_bar_shows_is_logged_with_its_size_and_then_every_half_minute(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("redrafter_mlx.weights.LOGGED_BYTES", 1000)
    files = {"config.json": b"{}", "model.safetensors": b"x" * 5000}
    hub.repos["org/small", "main"] = files
    resolve("org/small")
    assert [r.getMessage() for r in caplog.records] == ["downloading model.safetensors (5 kB)"]
    caplog.clear()
    times = iter([0.0, 10.0, 31.0, 31.0, 40.0, 62.0, 62.0])
    report = log_progress(lambda: next(times))
    for done in range(0, 10_000, 2000):
        report("downloading a\x1b", done, 5_000_000_000)
    lines = [r.getMessage() for r in caplog.records]
    assert lines == [f"downloading a?{x}" for x in (
        " (5.0 GB)", ": 4 kB of 5.0 GB", ": 8 kB of 5.0 GB",
    )]  # fmt: skip
    caplog.clear()
    resolve("org/small", progress=lambda *_: None)
    assert not caplog.records


def test_pull_takes_a_drafter_and_names_one_that_is_not_supported(
    hub: FakeHub, tmp_path: Path, cli: CommandLine
) -> None:
    save_drafter(random_drafter(), tmp_path / "own")
    mx.save_safetensors(str(tmp_path / "hydra"), {"hydra_lm_head.0.weight": mx.zeros(4)})
    for repo, config, weights in (
        ("org/redrafter", tmp_path / "own" / "config.json", tmp_path / "own" / "model.safetensors"),
        ("org/hydra", tmp_path / "own" / "config.json", tmp_path / "hydra.safetensors"),
    ):
        files = {"config.json": config.read_bytes(), "model.safetensors": weights.read_bytes()}
        hub.repos[repo, "main"] = files
    like_a_model = {"config.json": b'{"model_type": "qwen3", "num_hidden_layers": 5}'}
    hub.repos["org/hydra", "main"] |= like_a_model | {"tokenizer.json": b"{}"}
    assert Path(cli.out("pull", "org/redrafter").strip()) == resolve("org/redrafter").path
    assert "is a Hydra drafter, which is not supported" in cli.error("pull", "org/hydra")
