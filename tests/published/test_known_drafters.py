"""Published drafters: their targets, the list of `drafters`, and the choice of "auto"."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command_line import CommandLine
from huggingface_hub import constants
from tiny import byte_tokenizer, plain_tokens, random_drafter, random_model
from weights_samples import F32, Q4_1, gguf_metadata, gguf_tensors, llama_model, write_gguf

from redrafter_mlx.drafting.recurrent import save_drafter
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.loading import load as loading
from redrafter_mlx.loading.load import load
from redrafter_mlx.loading.target import LoadedTarget
from redrafter_mlx.target_model.source import TargetSource
from redrafter_mlx.weights.fetching.resolve import is_repo
from redrafter_mlx.weights.known_drafters import (
    KNOWN_DRAFTERS,
    KnownDrafter,
    head_in_original,
    known_drafters,
)
from redrafter_mlx.weights.precision import stored_bits
from redrafter_mlx.weights.registry import DEFAULT_MODEL


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b-instruct"),
        ("mlx-community/Meta-Llama-3.1-8B-Instruct-4bit", "llama-3.1-8b-instruct"),
        ("mlx-community/Llama-3.1-8B-Instruct-4bit@main", "llama-3.1-8b-instruct"),
        ("/models/Llama-3.2-3B-Instruct-bf16/", "llama-3.2-3b-instruct"),
        ("mlx-community/Qwen3-8B-4bit-DWQ-053125", "qwen3-8b"),
        ("Qwen/Qwen3-8B-MLX-4bit", "qwen3-8b"),
        ("mlx-community/Llama-2-7b-chat-4-bit", "llama-2-7b-chat"),
        ("mlx-community/Qwen3-8B-4bit-gs32", "qwen3-8b"),
        ("mlx-community/Qwen3-8B-mxfp4", "qwen3-8b"),
        ("mlx-community/Qwen3-8B-nvfp4", "qwen3-8b"),
        ("mlx-community/Qwen3-8B-mixed-3-6bit", "qwen3-8b"),
        ("/hub/models--mlx-community--Qwen3-8B-4bit/snapshots/0af3/", "qwen3-8b"),
        ("vicuna-7b", "vicuna-7b-v1.3"),
        ("lmsys/vicuna-7b-v1.3@refs/pr/4", "vicuna-7b-v1.3"),
        ("/home/me@work/models/Qwen3-8B-4bit", "qwen3-8b"),
        ("/models/Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf", "llama-3.1-8b-instruct"),
        ("Meta-Llama-3.1-8B-Instruct.Q4_0.gguf", "llama-3.1-8b-instruct"),
        ("Llama-3.2-3B-Instruct-BF16.gguf", "llama-3.2-3b-instruct"),
        ("vicuna-13b-v1.3.f16.gguf", "vicuna-13b-v1.3"),
        ("vicuna-7b-v1.3.gguf", "vicuna-7b-v1.3"),
        ("unsloth/Qwen3-8B-unsloth-bnb-4bit", "qwen3-8b"),
        ("Qwen/Qwen3-8B-FP8", "qwen3-8b"),
        ("Qwen/Qwen3-8B-GGUF", "qwen3-8b"),
        ("Qwen3-8B-IQ4_XS.gguf", "qwen3-8b"),
        ("Qwen3-8B-UD-Q4_K_XL.gguf", "qwen3-8b"),
        ("vicuna-7b-v1.5.Q8_0.gguf", None),
        ("mlx-community/Qwen3-8B-Base-4bit", None),
        ("mlx-community/Qwen3-4B-Instruct-2507-4bit", None),
        ("mlx-community/Llama-3.1-8B-4bit", None),
        (DEFAULT_MODEL, None),
        ("", None),
    ],
)
def test_a_conversion_has_the_drafters_of_its_model(name: str, family: str | None) -> None:
    assert known_drafters(name) == (KNOWN_DRAFTERS[family] if family else ())


def test_every_known_drafter_can_be_pulled() -> None:
    for known in {one for several in KNOWN_DRAFTERS.values() for one in several}:
        assert is_repo(known.name), known


def test_a_head_over_all_tokens_comes_after_those_with_a_draft_vocabulary() -> None:
    for known in KNOWN_DRAFTERS.values():
        eagle = [one.repo for one in known if one.form == "EAGLE-3"]
        assert eagle == sorted(eagle, key=lambda repo: repo.startswith("deepseek-ai/"))


REPO = "org/tiny-drafter"
KNOWN = {"tiny": (KnownDrafter(REPO, "ReDrafter", size=4_000_000),)}
ASKED = [1, 2, 3]


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches, a tiny model under the name org/tiny-4bit, and a drafter known for it."""
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path / "ours"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("redrafter_mlx.weights.known_drafters.KNOWN_DRAFTERS", KNOWN)
    source = TargetSource("org/tiny-4bit", tmp_path, "sha256:t", "llama", "float32", None, None)
    target = LoadedTarget.of(random_model(), byte_tokenizer(), source)
    monkeypatch.setattr(loading, "load_target", lambda *_, **__: target)
    return tmp_path


def on_disk(root: Path) -> Path:
    """Put the known drafter into the Hub's cache."""
    repo = root / "hub" / f"models--{REPO.replace('/', '--')}"
    folder = repo / "snapshots" / ("0" * 40)
    save_drafter(random_drafter(), folder)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(folder.name)
    return folder


def test_auto_takes_a_published_drafter_that_is_here_and_else_says_what_to_pull(tiny: Path) -> None:
    without = load("org/tiny-4bit")
    assert without.drafting == "lookup and earlier"
    assert without.drafter_note is not None
    assert f"`redrafter-mlx pull {REPO}` fetches one (ReDrafter, 4 MB)" in without.drafter_note
    folder = on_disk(tiny)
    redrafter = load("org/tiny-4bit")
    assert redrafter.drafting == "drafter and lookup and earlier"
    assert redrafter.drafter_note == f"drafts with {REPO}"
    assert redrafter.generate(ASKED, max_tokens=9).token_ids == plain_tokens(
        random_model(), ASKED, 9
    )
    save_drafter(random_drafter(1, target_fingerprint="sha256:t"), tiny / "ours" / "drafters" / "a")
    own = load("org/tiny-4bit")
    assert own.drafter_note is None
    shutil.rmtree(tiny / "ours" / "drafters")
    (folder / "model.safetensors").write_bytes(b"broken")
    broken = load("org/tiny-4bit")
    assert broken.drafting == "lookup and earlier"
    assert str(folder) in str(broken.drafter_note)


def test_drafters_lists_what_is_known_and_what_is_here(tiny: Path, cli: CommandLine) -> None:
    title, row = cli.out("drafters", "org/tiny-4bit").splitlines()
    assert title.split() == ["NAME", "FORM", "ON", "DISK", "SIZE", "LICENSE"]
    assert row.split() == [REPO, "ReDrafter", "no", "4", "MB", "unknown"]
    folder = on_disk(tiny)
    said = cli.json("drafters", "org/tiny-4bit", "--json")
    assert said["model"] == "org/tiny-4bit"
    (drafter,) = said["drafters"]
    assert (drafter["name"], drafter["path"]) == (REPO, str(folder))
    _, shipped = cli.out("drafters", DEFAULT_MODEL).splitlines()
    assert DEFAULT_MODEL in shipped
    assert shipped.split()[-1] == "apache-2.0"
    assert "no drafter is known for org/unknown" in cli.out("drafters", "org/unknown")
    assert "no model 'unknown'" in cli.error("drafters", "unknown")


@pytest.mark.parametrize(
    ("bits", "asked", "stored"),
    [(4, None, 4), (3, None, 4), (6, None, 8), (8, None, 8), (None, None, None),
     (4, 8, 8), (None, 4, 4), (4, 16, None)],
)  # fmt: skip
def test_a_drafter_has_the_bits_of_its_target_unless_others_are_asked_for(
    tiny: Path,
    monkeypatch: pytest.MonkeyPatch,
    bits: int | None,
    asked: int | None,
    stored: int | None,
) -> None:
    source = TargetSource("org/tiny-4bit", tiny, "sha256:t", "llama", "float32", bits, None)
    target = LoadedTarget.of(random_model(), byte_tokenizer(), source)
    monkeypatch.setattr(loading, "load_target", lambda *_, **__: target)
    on_disk(tiny)
    redrafter = load("org/tiny-4bit", drafter_bits=asked)
    assert redrafter.drafter is not None
    assert redrafter.drafter.module is not None
    assert stored_bits(redrafter.drafter.module) == stored
    wanted = plain_tokens(random_model(), ASKED, 9)
    assert redrafter.generate(ASKED, max_tokens=9).token_ids == wanted


@pytest.mark.parametrize(
    ("kind", "bits", "asked", "quantize"),
    [(Q4_1, 4, None, 4), (Q4_1, 8, None, None), (F32, 4, None, 4), (F32, None, None, None),
     (F32, 4, 16, None), (Q4_1, 8, 8, 8)],
)  # fmt: skip
def test_a_draft_model_that_is_quantised_already_keeps_its_bits_unless_others_are_asked_for(
    tiny: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: int,
    bits: int | None,
    asked: int | None,
    quantize: int | None,
) -> None:
    source = TargetSource("org/tiny-4bit", tiny, "sha256:t", "llama", "float32", bits, None)
    target = LoadedTarget.of(random_model(), byte_tokenizer(), source)
    monkeypatch.setattr(loading, "load_target", lambda *_, **__: target)
    loaded: list[int | None] = []

    def load_draft(*_: object, quantize: int | None, **__: object) -> None:
        loaded.append(quantize)
        raise BadInputError("enough")

    monkeypatch.setattr("redrafter_mlx.loading.drafter.load_target", load_draft)
    file = write_gguf(tiny / "draft.gguf", gguf_metadata(), gguf_tensors(llama_model(), kind))
    with pytest.raises(BadInputError, match="enough"):
        load("org/tiny-4bit", drafter=file, drafter_bits=asked)
    assert loaded == [quantize]


def test_show_describes_a_drafter_by_its_form_size_and_target(tiny: Path, cli: CommandLine) -> None:
    folder = on_disk(tiny)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "target": "org/tiny"}))
    for name in (REPO, str(folder)):
        rows = dict(x.split("  ", 1) for x in cli.out("show", name).splitlines())
        assert rows["form"].strip() == "ReDrafter drafter"
        assert rows["target"].strip() == "org/tiny"
        assert rows["path"].strip() == str(folder)
        assert rows["on disk"].strip().endswith("kB")


@pytest.mark.parametrize(
    ("model", "head"),
    [
        ("glm-4.7-flash", "mtp:zai-org/GLM-4.7-Flash"),
        ("mlx-community/Qwen3.5-27B-4bit", "mtp:Qwen/Qwen3.5-27B"),
    ],
)
def test_a_head_that_a_conversion_left_out_is_named(
    model: str, head: str, cli: CommandLine
) -> None:
    assert f"--drafter {head}" in cli.out("drafters", model)


def test_the_original_itself_needs_no_head_from_elsewhere() -> None:
    assert head_in_original("zai-org/GLM-4.7-Flash") is None
    assert head_in_original("qwen3-8b") is None
