"""Whether a model has a chat template is known from its files, before it is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import CommandLine
from mlx_lm.utils import save_model
from tiny import CHAT_TEMPLATE, byte_model, byte_tokenizer, random_drafter
from weights_samples import gguf_metadata, gguf_tensors, llama_model, write_gguf

from redrafter_mlx.drafting.recurrent import save_drafter
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.loading import target as target_module
from redrafter_mlx.loading.load import load
from redrafter_mlx.weights.gguf.load import load_gguf
from redrafter_mlx.weights.load_folder import load_folder
from redrafter_mlx.weights.text.chat_template import has_chat_template

NAMED = [{"name": "rag", "template": CHAT_TEMPLATE}, {"name": "default", "template": CHAT_TEMPLATE}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model's folder without a chat template."""
    model, words = byte_model(), byte_tokenizer()
    path = tmp_path / "base"
    path.mkdir()
    save_model(path, model)
    config = {**vars(model.args), "eos_token_id": 256}
    plain = {k: v for k, v in config.items() if isinstance(v, (int, float, str, bool, dict))}
    (path / "config.json").write_text(json.dumps(plain))
    words._tokenizer.chat_template = None
    words._tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("template", "file", "name", "has"),
    [
        (None, None, "base", False),
        (CHAT_TEMPLATE, None, "base", True),
        (NAMED, None, "base", True),
        (None, CHAT_TEMPLATE, "base", True),
        (None, None, "org/my-vicuna", True),
    ],
    ids=["none", "in the settings", "several", "in a file", "Vicuna's"],
)
def test_files_tell_what_the_loaded_tokenizer_will(
    template: object, file: str | None, name: str, has: bool, folder: Path
) -> None:
    settings = folder / "tokenizer_config.json"
    known = json.loads(settings.read_text())
    settings.write_text(
        json.dumps(known if template is None else known | {"chat_template": template})
    )
    if file is not None:
        (folder / "chat_template.jinja").write_text(file)
    assert has_chat_template(folder, name) is has
    assert load_folder(folder, name).read_tokenizer().has_chat_template is has


@pytest.mark.parametrize("has", [True, False])
def test_the_header_of_a_gguf_tells_it_too(has: bool, tmp_path: Path) -> None:
    metadata = gguf_metadata()
    if not has:
        metadata.pop("tokenizer.chat_template", None)
    path = write_gguf(tmp_path / "m.gguf", metadata, gguf_tensors(llama_model()))
    assert has_chat_template(path, "m") is has
    assert load_gguf(path).read_tokenizer().has_chat_template is has


def test_a_model_that_cannot_chat_is_refused_before_it_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unloaded(*_: object) -> None:
        raise AssertionError("it was loaded")

    monkeypatch.setattr(target_module, "read_target", unloaded)
    with pytest.raises(BadInputError, match=r"base has no chat template; give --raw"):
        load(str(folder), chat_or="give --raw")


ASKING = (["bench", "-r", "1"], ["verify"], ["tune"], ["generate", "-p", "Hello"])
"""Commands that ask questions, or for one; `quality` asks for a drafter's folder, too."""


@pytest.mark.parametrize("words", [*ASKING, ["quality"], ["chat"]], ids=lambda words: words[0])
def test_a_command_says_before_loading_what_to_do_with_a_model_that_cannot_chat(
    words: list[str],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cli: CommandLine,
) -> None:
    def unloaded(*_: object, **__: object) -> None:
        raise AssertionError("it was loaded")

    monkeypatch.setattr(target_module, "read_target", unloaded)
    if words == ["quality"]:
        save_drafter(random_drafter(vocab_size=258), tmp_path / "drafter")
        words = [*words, str(tmp_path / "drafter")]
    *_, line = cli.error(*words, "-m", folder).splitlines()
    assert "base has no chat template" in line
    assert "--raw" in line


@pytest.mark.parametrize("words", [*ASKING, ["quality"]], ids=lambda words: words[0])
def test_questions_are_plain_text_by_raw(
    words: list[str], folder: Path, tmp_path: Path, cli: CommandLine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("REDRAFTER_BLAS", "the one in use")  # `tune` would restart with a faster one
    few = {"bench": ["--limit", "1", "--warmup", "0"], "verify": ["--limit", "1"]}
    more = [*few.get(words[0], []), *([] if words == ["tune"] else ["--max-tokens", "8"])]
    if words == ["quality"]:
        save_drafter(random_drafter(vocab_size=258), tmp_path / "drafter")
        words = [*words, str(tmp_path / "drafter"), "--limit", "1"]
    else:
        words = [*words, "--drafter", "lookup"]
    assert "--raw" not in cli.run(*words, "-m", folder, "--raw", *more).err


def test_plain_questions_are_named_in_the_result_of_a_benchmark(
    folder: Path, cli: CommandLine
) -> None:
    words = ["bench", "--raw", "-m", str(folder), "--drafter", "lookup", "--limit", "1", "-r", "1"]
    found = cli.json(*words, "--max-tokens", "4", "--warmup", "0", "--json")
    assert "plain text" in found["protocol"]["questions"]
