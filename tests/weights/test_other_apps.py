"""Models that Ollama and LM Studio downloaded are listed, and load by the names shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import CommandLine
from weights_samples import F16, gguf_metadata, gguf_tensors, llama_model, write_folder, write_gguf

from redrafter_mlx.errors import DamagedFileError, ModelNotFoundError, UnsupportedModelError
from redrafter_mlx.loading.target import load_target
from redrafter_mlx.weights.fetching.resolve import find_local
from redrafter_mlx.weights.status import list_models

OWN = "registry.ollama.ai/library"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    return tmp_path


def add_to_ollama(
    models: Path, name: str, layers: tuple[str, ...] = ("model", "template"), **changes: object
) -> Path:
    """Write a manifest and the file of its model; `name` is HOST/SPACE/MODEL/TAG."""
    digest = f"{len(list(models.rglob('*'))):064x}"
    blob = models / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    write_gguf(blob, gguf_metadata(**changes), gguf_tensors(llama_model(), F16))
    manifest = models / "manifests" / name
    manifest.parent.mkdir(parents=True)
    named = [
        {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{digest}"}
        for kind in layers
    ]
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": named}))
    return blob


def listed() -> dict[str, Path | None]:
    return {model.name: model.path for model in list_models()}


def test_ollamas_models_are_listed_and_load_by_name(home: Path, cli: CommandLine) -> None:
    models = home / ".ollama" / "models"
    names = {
        "tiny:1b": f"{OWN}/tiny/1b",
        "mine/tiny:latest": "registry.ollama.ai/mine/tiny/latest",
        "hf.co/org/tiny-GGUF:Q8_0": "hf.co/org/tiny-GGUF/Q8_0",
    }
    blobs = {name: add_to_ollama(models, path) for name, path in names.items()}
    assert {name: listed()[name] for name in names} == blobs
    for name in names:
        target = load_target(name)
        assert (target.source.name, target.source.path) == (name, blobs[name])
    row = next(line for line in cli.out("list").splitlines() if line.startswith("tiny:1b"))
    assert "yes" in row.split()


def test_the_folder_of_ollama_may_be_another_one(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = add_to_ollama(home / "elsewhere", f"{OWN}/tiny/1b")
    with pytest.raises(ModelNotFoundError, match="tiny:1b"):
        find_local("tiny:1b")
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "elsewhere"))
    assert listed()["tiny:1b"] == blob


def test_what_cannot_be_read_of_ollama_is_not_listed_and_named_if_it_is_asked_for(
    home: Path,
) -> None:
    models = home / ".ollama" / "models"
    add_to_ollama(models, f"{OWN}/adapted/1b", ("model", "adapter"))
    add_to_ollama(models, f"{OWN}/embedding/1b", general__architecture="bert")
    add_to_ollama(models, f"{OWN}/lost/1b").unlink()
    before = listed()
    assert not {"adapted:1b", "embedding:1b", "lost:1b"} & before.keys()
    with pytest.raises(UnsupportedModelError, match="adapter"):
        load_target("adapted:1b")
    with pytest.raises(DamagedFileError, match=r"lost/1b.*sha256-"):
        load_target("lost:1b")
    with pytest.raises(UnsupportedModelError, match="bert"):
        load_target("embedding:1b")
    (models / "manifests" / OWN / "lost" / "1b").write_text("{")
    assert listed() == before


@pytest.mark.parametrize("place", [".lmstudio/models", ".cache/lm-studio/models"])
def test_lm_studios_models_are_listed_and_load_by_name(home: Path, place: str) -> None:
    folder = home / place / "org" / "tiny-GGUF"
    folder.mkdir(parents=True)
    tensors = gguf_tensors(llama_model(), F16)
    names = ["tiny.gguf", "mmproj-tiny.gguf", "split-00001-of-00002.gguf"]
    for name in names:
        write_gguf(folder / name, gguf_metadata(), tensors)
    write_gguf(folder / "split-00002-of-00002.gguf", {}, {})
    mlx = write_folder(home / place / "mlx" / "tiny", llama_model())
    config = json.loads((mlx / "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLM"]
    (mlx / "config.json").write_text(json.dumps(config))
    (mlx / "tokenizer.json").write_text("{}")
    found = {name: path for name, path in listed().items() if name.startswith(("org/", "mlx/"))}
    assert found == {
        "org/tiny-GGUF/tiny.gguf": folder / "tiny.gguf",
        "org/tiny-GGUF/split-00001-of-00002.gguf": folder / "split-00001-of-00002.gguf",
        "mlx/tiny": mlx,
    }
    assert load_target("org/tiny-GGUF/tiny.gguf").source.path == folder / "tiny.gguf"
    local = find_local("mlx/tiny")
    assert local is not None
    assert local.path == mlx
