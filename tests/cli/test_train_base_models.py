"""`redrafter-mlx train` for models that cannot chat: no template, or turns that never end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlx_lm.utils import save_model
from tiny import CHAT_TEMPLATE, byte_model, byte_tokenizer

from redrafter_mlx.cli import main
from redrafter_mlx.distill.corpus.prompts.conversations import Conversation
from redrafter_mlx.distill.corpus.reader import Reader
from redrafter_mlx.distill.options_file import read_options
from redrafter_mlx.target_model.model import Target

SMALL = """
answer_tokens = 600
workers = 2
timed_questions = 1
[writing]
batch = 15
openings = [0]
max_answer_tokens = 40
[drafter]
draft_vocab = 100
layers = 1
context_layers = []
[training]
batch = 32
draft_length = 3
evaluations = 1
epochs = 1
"""
TEXTS = [f"The text of number {i} goes on for a while, and ends." for i in range(70)]


def base_model(folder: Path, template: str | None) -> Path:
    """Write a tiny model's folder, whose end of text the model never writes."""
    model, words = byte_model(), byte_tokenizer()
    folder.mkdir()
    save_model(folder, model)
    words._tokenizer.add_tokens(["<eos>"], special_tokens=True)  # beyond the model's vocabulary
    words._tokenizer.eos_token = "<eos>"
    words._tokenizer.chat_template = template
    config = {**vars(model.args), "eos_token_id": 258}
    plain = {k: v for k, v in config.items() if isinstance(v, (int, float, str, bool, dict))}
    (folder / "config.json").write_text(json.dumps(plain))
    words._tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def line(tmp_path: Path) -> list[str]:
    """The command line of a small run, which has a file of plain texts beside it."""
    (tmp_path / "small.toml").write_text(SMALL)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    return [
        "train", "--config", str(tmp_path / "small.toml"), "--output", str(tmp_path / "out"),
        "--model", str(tmp_path / "base"),
    ]  # fmt: skip


def test_a_model_without_a_template_is_refused_in_one_line_before_it_is_loaded(
    line: list[str], tmp_path: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = base_model(tmp_path / "base", None) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])  # loading it would find it damaged
    for more in ([], ["--prompts", str(tmp_path / "texts.txt")], ["--hours", "8"]):
        assert main.run([*line, *more]) == 1
        (error,) = capsys.readouterr().err.splitlines()
        assert "no chat template" in error
        assert all(option in error for option in ("--data", "--prompts", "--raw"))
    assert not (own_cache / "corpora").exists()


def test_a_model_whose_turns_never_end_is_given_up_after_one_block_with_the_reason(
    line: list[str], tmp_path: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base_model(tmp_path / "base", CHAT_TEMPLATE)
    config = tmp_path / "small.toml"
    text = config.read_text().replace("workers = 2", "workers = 1")
    config.write_text(text.replace("batch = 15", "batch = 30"))
    assert main.run(line) == 1
    error = capsys.readouterr().err
    assert "prompt unfinished" in error
    assert "--raw" in error
    assert (
        len([*(own_cache / "corpora").rglob("block-*")]) <= 2
    )  # one, and the prompts read with it


@pytest.mark.parametrize("option", ["--data", "--prompts"])
def test_plain_texts_train_a_drafter_for_a_model_without_a_template(
    option: str, line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base_model(tmp_path / "base", None)
    assert main.run([*line, "--raw", option, str(tmp_path / "texts.txt")]) == 0
    assert "--raw" in capsys.readouterr().out  # how to use it
    assert read_options(tmp_path / "out" / "train.toml")["raw"] is True
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "named"),
    [(["--raw"], "--data"), (["--raw", "--prompts", "texts.txt", "--own"], "own_share")],
)
def test_raw_without_texts_is_refused(
    options: list[str], named: str, line: list[str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if "--own" in options:
        options = options[:-1]
        config = tmp_path / "small.toml"
        config.write_text(config.read_text().replace("[writing]", "[writing]\nown_share = 0.5"))
    assert main.run([*line, *options]) == 1
    assert named in capsys.readouterr().err


def test_plain_texts_are_read_as_they_are() -> None:
    words = byte_tokenizer()
    given = [
        Conversation(("One two three four five six seven.",)),
        Conversation(("What? ",), ("That, and more.",)),
    ]
    reader = Reader(Target(byte_model()), words, given, "data", 3, raw=True)
    texts = reader.write(0).texts
    read = [words.decode([*text.prompt, *text.answer.tolist()]) for text in texts]
    assert read == ["One two three four five six seven.", "What? That, and more."]
    assert words.decode(texts[1].prompt) == "What? "
