"""What `list`, `show` and `pull` say of names, files and damage."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from command_line import CommandLine
from fake_hub import CONTENT, NAME, FakeHub
from repositories import serve_model

from redrafter_mlx.errors import DamagedFileError, ModelNotFoundError
from redrafter_mlx.runtime.files.paths import human_size
from redrafter_mlx.weights import registry
from redrafter_mlx.weights.fetching.resolve import resolve
from redrafter_mlx.weights.status import list_models, show_model


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


def test_sizes_are_readable() -> None:
    sizes = [0, 2_100, 98_362_432, 13_500_000_000]
    assert [human_size(n) for n in sizes] == ["0 bytes", "2 kB", "98 MB", "13.5 GB"]


def test_list_says_what_is_here(hub: FakeHub) -> None:
    assert [(m.name, m.path) for m in list_models()] == [(n, None) for n in registry.REGISTRY]
    serve_model(hub)
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
    tmp_path: Path, cli: CommandLine, command: str, files: dict[str, bytes], named: str
) -> None:
    folder, junk = tmp_path / "folder", tmp_path / "junk.gguf"
    folder.mkdir()
    junk.write_bytes(b"no model at all" * 10)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    for path, words in ((folder, named), (junk, "GGUF")):
        err = cli.error(command, path)
        assert str(path) in err
        assert words in err


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


def test_show_tells_of_damage_in_one_line(hub: FakeHub) -> None:
    serve_model(hub)
    resolve(NAME)
    with pytest.raises(DamagedFileError, match="not a GGUF file"):
        show_model(NAME)
    assert show_model("vicuna-7b").path is None
