"""What cannot be used or does not fit is refused before its weights are fetched."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import CommandLine
from fake_hub import NAME, FakeHub
from huggingface_hub import constants
from macs import mac
from repositories import DRAFTER, LARGE, REPO_FILES, model_files, serve_model, weights_asked
from tiny import byte_tokenizer, random_model

from redrafter_mlx.cli import main
from redrafter_mlx.drafting.names import parse
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
from redrafter_mlx.runtime.files.paths import check_free_disk
from redrafter_mlx.target_model.source import TargetSource
from redrafter_mlx.weights.fetching.resolve import pull, resolve


@pytest.mark.parametrize("weights", [DRAFTER, {"weights.00.safetensors": b"0" * 50}])
def test_a_language_model_in_files_of_other_names_is_refused_before_its_weights_are_fetched(
    hub: FakeHub, weights: dict[str, bytes]
) -> None:
    hub.repos["org/old", "main"] = {**weights, "config.json": b'{"num_hidden_layers": 32}'}
    with pytest.raises(ModelNotFoundError, match="org/old holds no config"):
        resolve("org/old")
    assert not any(".bin" in line or "weights.00" in line for line in hub.asked)


def test_repository_without_weights_that_load_is_refused_before_download(hub: FakeHub) -> None:
    hub.repos["org/repo", "main"] = {"config.json": b"{}", "m.Q4.gguf": b"x"}
    with pytest.raises(ModelNotFoundError, match=r"GGUF.*m\.Q4\.gguf"):
        resolve("org/repo")


def test_full_disk_is_noticed_before_the_download(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["org/repo", "main"] = REPO_FILES
    serve_model(hub)
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
        assert not weights_asked(hub)


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layer", "num_loops"])
def test_millions_of_layers_are_refused_before_a_module_is_built_or_a_weight_is_fetched(
    hub: FakeHub, key: str
) -> None:
    config = {**LARGE, "rms_norm_eps": 1e-5, "model_type": "llama"}
    hub.repos["org/odd", "main"] = model_files({**config, key: 30_000_000})
    with pytest.raises(DamagedFileError, match=f"org/odd: .*config.json: {key} is 30000000"):
        load_target("org/odd")
    assert not weights_asked(hub)


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
        assert not weights_asked(hub)


def test_a_model_without_a_tokenizer_is_refused_before_its_weights_are_fetched(
    hub: FakeHub, cli: CommandLine
) -> None:
    """A drafter needs none."""
    files = model_files({**LARGE, "rms_norm_eps": 1e-5})
    del files["tokenizer.json"]
    hub.repos["org/torn", "main"] = files
    for command in ("pull", "org/torn"), ("generate", "-p", "x", "--model", "org/torn"):
        assert "org/torn: the repository holds no tokenizer" in cli.error(*command)
        assert not weights_asked(hub)
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
    assert weights_asked(hub) == (not quantised)


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
